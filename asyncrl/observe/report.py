"""The closing figures of a run, and how much faster it was than another one."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from asyncrl.config import Config
from asyncrl.config_file import resolved
from asyncrl.observe.run_folder import RunFolder


@dataclass(frozen=True)
class Summary:
    """What a run achieved. A figure is None when the run ended before there was one."""

    name: str
    folder: str
    is_complete: bool
    """Whether all steps were made."""
    steps: int
    """Optimizer steps made."""
    total_steps: int
    """Optimizer steps that were asked for."""
    wall_s: float
    """From the first rollout to the last publication; 0 when that did not happen."""
    validation_reward_before: float | None
    """Mean reward of the held-out prompts under policy version 0."""
    validation_reward_after: float | None
    """The same under the last version."""
    train_reward_first: float | None
    """Mean reward of the first tenth of the steps."""
    train_reward_last: float | None
    """Mean reward of the last tenth of the steps."""
    tokens_per_s: float | None
    trainer_idle_share: float | None
    staleness_mean: float | None
    staleness_max: float | None
    staleness_bound: int
    staleness_threshold: float
    speedup: float | None
    """Wall time of the run `run.compare_to` over this one's; above 1 = this one is faster."""
    comparison: str
    """The speed-up in words, or why there is none."""
    machine: dict[str, str | int]
    """Host name and number of cores."""

    def write(self, path: Path) -> None:
        """Writes the figures as one JSON object."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def show(self, console: Console) -> None:
        """Prints the figures as a table."""
        table = Table(title=f"{self.name}: {self.steps} of {self.total_steps} steps")
        table.add_column("figure")
        table.add_column("value", overflow="fold")
        for figure, value in self.rows():
            table.add_row(figure, value)
        console.print(table)

    def rows(self) -> list[tuple[str, str]]:
        """(figure, value) as they are shown."""
        held_out = _arrow(self.validation_reward_before, self.validation_reward_after)
        return [
            ("reward, held-out prompts", held_out),
            (
                "reward, first → last tenth of steps",
                _arrow(self.train_reward_first, self.train_reward_last),
            ),
            ("rollout tokens/s", _show(self.tokens_per_s, ",.0f")),
            ("trainer idle share", _show(self.trainer_idle_share, ".1%")),
            (
                "staleness",
                f"mean {_show(self.staleness_mean, '.2f')}, "
                f"max {_show(self.staleness_max, '.0f')}, bound {self.staleness_bound}",
            ),
            ("wall time", f"{self.wall_s:.1f} s"),
            ("overlap", self.comparison),
            ("run folder", self.folder),
        ]


def summarize(
    config: Config,
    *,
    folder: RunFolder,
    steps: Sequence[Mapping[str, float]],
    validations: Sequence[Mapping[str, float]],
    wall_s: float,
) -> Summary:
    """The summary of what was recorded, complete or not.

    steps: metrics of each optimizer step, in order; validations: `policy_version` and
    `reward/mean` of each validation, in order; wall_s: seconds from the first rollout to the last
    publication.
    """
    tenth = max(1, len(steps) // 10)
    is_complete = len(steps) == config.trainer.total_steps and wall_s > 0
    speedup, comparison = _compare(config, folder, wall_s=wall_s, is_complete=is_complete)
    return Summary(
        name=config.run.name,
        folder=str(folder.root),
        is_complete=is_complete,
        steps=len(steps),
        total_steps=config.trainer.total_steps,
        wall_s=wall_s,
        validation_reward_before=validations[0]["reward/mean"] if validations else None,
        validation_reward_after=_reward_under(validations, version=config.num_versions),
        train_reward_first=_mean(steps[:tenth], "reward/mean"),
        train_reward_last=_mean(steps[-tenth:], "reward/mean"),
        tokens_per_s=_rate(steps),
        trainer_idle_share=_idle_share(steps),
        staleness_mean=_mean(steps, "staleness/token_mean"),
        staleness_max=max(_values(steps, "staleness/token_max"), default=None),
        staleness_bound=config.max_staleness,
        staleness_threshold=config.asynchrony.staleness_threshold,
        speedup=speedup,
        comparison=comparison,
        machine=_machine(),
    )


def _compare(
    config: Config, folder: RunFolder, *, wall_s: float, is_complete: bool
) -> tuple[float | None, str]:
    """(speed-up, what to say about it), over `run.compare_to` or a synchronous run beside it."""
    if not is_complete:
        return None, "not measured; the run did not make all its steps"
    other = config.run.compare_to or _synchronous_neighbour(config, folder)
    if other is None:
        return None, (
            "not measured; the summary compares with a run of the same configuration with "
            "async.staleness_threshold=0 in the same folder, or with run.compare_to"
        )
    theirs = json.loads(RunFolder(other).summary.read_text())
    reasons = _obstacles(config, RunFolder(other))
    if reasons:
        return None, f"not comparable with {other}: {', '.join(reasons)}"
    speedup = theirs["wall_s"] / wall_s
    verb = "faster than" if speedup >= 1 else "the speed of"
    return speedup, (
        f"{speedup:.2f}× {verb} {other} ({theirs['wall_s']:.1f} s with async.staleness_threshold="
        f"{theirs['staleness_threshold']:g}, bound {theirs['staleness_bound']}; here "
        f"{wall_s:.1f} s with {config.asynchrony.staleness_threshold:g}, bound "
        f"{config.max_staleness})"
    )


def _synchronous_neighbour(config: Config, folder: RunFolder) -> Path | None:
    """The newest comparable run beside this one with threshold 0; None for a synchronous run."""
    if config.asynchrony.staleness_threshold == 0:
        return None
    found = []
    for path in folder.root.resolve().parent.iterdir():
        summary = RunFolder(path).finished_summary()
        if summary is not None and summary.get("staleness_threshold") == 0:
            found.append(RunFolder(path))
    found.sort(key=lambda run: run.summary.stat().st_mtime, reverse=True)
    return next((run.root for run in found if not _obstacles(config, run)), None)


def _obstacles(config: Config, other: RunFolder) -> list[str]:
    """Why wall times of the two runs say nothing about asynchrony."""
    reasons = _differences(config, yaml.safe_load(other.config.read_text()))
    if json.loads(other.summary.read_text())["machine"] != _machine():
        reasons.append("it ran on another machine")
    return reasons


def _differences(config: Config, theirs: dict[str, Any]) -> list[str]:
    """Dotted keys, but for run.* and the threshold, in which two resolved configurations differ."""
    mine = _flat(resolved(config))
    other = _flat(theirs)
    keys = sorted(mine.keys() | other.keys())
    return [
        f"{key} differs"
        for key in keys
        if not key.startswith("run.")
        and key != "async.staleness_threshold"
        and mine.get(key) != other.get(key)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _reward_under(validations: Sequence[Mapping[str, float]], *, version: int) -> float | None:
    found = [v["reward/mean"] for v in validations if v["policy_version"] == version]
    return found[-1] if found else None


def _rate(steps: Sequence[Mapping[str, float]]) -> float | None:
    """Generated tokens a second, from the first rollout to the last step."""
    if not steps:
        return None
    return steps[-1]["rollout/tokens"] / steps[-1]["time/elapsed_s"]


def _idle_share(steps: Sequence[Mapping[str, float]]) -> float | None:
    """Share of its steps' time that the trainer waited for batches."""
    wait_s = sum(_values(steps, "trainer/wait_s"))
    busy_s = sum(_values(steps, "trainer/step_s"))
    return wait_s / (wait_s + busy_s) if wait_s + busy_s else None


def _machine() -> dict[str, str | int]:
    return {"host": platform.node(), "cores": os.cpu_count() or 0}


def _values(steps: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [step[key] for step in steps if key in step]


def _mean(steps: Sequence[Mapping[str, float]], key: str) -> float | None:
    values = _values(steps, key)
    return fmean(values) if values else None


def _show(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _arrow(before: float | None, after: float | None) -> str:
    return f"{_show(before, '.3f')} → {_show(after, '.3f')}"
