"""What the asynchrony buys: the quickstart against itself with `async.staleness_threshold=0`.

    pytest benchmarks/test_overlap.py -s

Runs A-B-B-A (A asynchronous, B synchronous) so that a machine that gets slower hits both alike,
each run in processes of its own, same seed, same number of steps. The ratio is of the sums of
wall times from the first rollout to the last publication; start-up and validation are outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

_THRESHOLDS = {"asynchronous": 1.0, "synchronous": 0.0}
_ORDER = ("asynchronous", "synchronous", "synchronous", "asynchronous")


def _run(kind: str, run_dir: Path, *, num_steps: int) -> dict[str, Any]:
    """The summary of one quickstart run."""
    command = [
        sys.executable,
        "-m",
        "asyncrl.train",
        f"async.staleness_threshold={_THRESHOLDS[kind]}",
        f"trainer.total_steps={num_steps}",
        "validation.num_prompts=0",
        f"run.dir={run_dir}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def test_asynchronous_against_synchronous(
    benchmark: BenchmarkFixture, tmp_path: Path, is_smoke: bool
) -> None:
    num_steps = 4 if is_smoke else 100
    order = _ORDER[:2] if is_smoke else _ORDER
    summaries: list[tuple[str, dict[str, Any]]] = []

    def all_runs() -> None:
        for index, kind in enumerate(order):
            run_dir = tmp_path / f"{index}-{kind}"
            summaries.append((kind, _run(kind, run_dir, num_steps=num_steps)))

    benchmark.group = "overlap"
    benchmark.pedantic(all_runs, rounds=1, iterations=1)
    wall_s = {kind: sum(s["wall_s"] for k, s in summaries if k == kind) for kind in _THRESHOLDS}
    ratio = wall_s["synchronous"] / wall_s["asynchronous"]
    benchmark.extra_info.update(ratio=ratio, num_cores=os.cpu_count(), num_steps=num_steps)
    for kind, summary in summaries:
        assert summary["steps"] == num_steps
        assert summary["staleness_max"] <= summary["staleness_bound"], kind
    if not is_smoke:
        print(f"\n{num_steps} steps: {wall_s}; asynchronous is {ratio:.2f} times as fast")
