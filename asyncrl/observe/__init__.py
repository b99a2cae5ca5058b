"""What a run shows and leaves behind: run folder, metrics, live screen, closing report.

Reads what the loops hand over and never asks a part for anything.
"""
