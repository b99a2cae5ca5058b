"""Environments: how a prompt becomes a scored completion. One module a kind.

A plug-in module offers `Config` and `Environment(config, *, engine, tokenizer, reward, rollout,
generation_s, reward_s)` with
`async rollout(prompt, prompt_tokens, *, request_id, seed) -> ScoredCompletion`, which raises
`RolloutFailed` for whatever may fail without ending the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.trajectory import Trajectory


class RolloutFailed(RuntimeError):
    """A completion that could not be had or scored; the message says why."""


@dataclass(frozen=True)
class ScoredCompletion:
    """What an environment returns."""

    trajectory: Trajectory
    """With its reward; the advantage comes later, from the group."""
    text: str
    """The completion without special tokens, as the reward saw it."""
