"""The metric names every optimizer step must carry, and the trackers that receive them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl import plugins
from asyncrl.config import Config
from asyncrl.interfaces import Tracker

REQUIRED = (
    "step",
    "policy_version",
    "reward/mean",
    "loss",
    "staleness/token_mean",
    "staleness/token_max",
    "staleness/bound",
    "trainer/idle_share",
    "rollout/tokens_per_s",
    "time/elapsed_s",
)
"""Keys that readers of metrics.jsonl may rely on."""


def open_trackers(config: Config, *, run_dir: Path) -> list[Tracker]:
    """One tracker for each section of `trackers`, writing into the run folder."""
    return [
        plugins.load("trackers", section.type).Tracker(
            section.settings("trackers"), run_dir=run_dir
        )
        for section in config.trackers
    ]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl, one an optimizer step, in order."""
    with path.open() as lines:
        return [json.loads(line) for line in lines if line.strip()]
