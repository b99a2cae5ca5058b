"""Rewards: one module a way to score. Each offers `Config`, `requires` if it needs packages, and
`Reward(config)`, which implements `asyncrl.interfaces.Reward` with numbers in [0, 1].
"""
