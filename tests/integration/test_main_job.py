"""The main job as a user starts it: a command, real Ray, real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

_SMALL = [
    "algorithm.group_size=4",
    "algorithm.mini_batch_groups=4",
    "validation.num_prompts=8",
]


def _command(run_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "asyncrl.train", *_SMALL, f"run.dir={run_dir}", *overrides]


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("asyncrl")}


def _processes_of(run_dir: Path) -> list[psutil.Process]:
    """Processes that still have a file of the run open."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(run_dir) in file.path for file in process.open_files()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_main_job_runs_and_leaves_a_whole_run_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    before = _shared_memory()
    command = _command(run_dir, "trainer.total_steps=6", "async.rollout_correction=sequence_tis")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    required = {
        "policy_version",
        "reward/mean",
        "loss",
        "staleness/token_mean",
        "staleness/token_max",
        "staleness/bound",
        "trainer/idle_share",
        "rollout/tokens_per_s",
        "time/elapsed_s",
    }
    assert required <= rows[-1].keys()
    assert all(row["staleness/token_max"] <= row["staleness/bound"] for row in rows)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 6
    assert "bound" in done.stdout
    assert _shared_memory() == before
    assert _processes_of(run_dir) == []
    _loads_in_transformers(run_dir / "model")


def _loads_in_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("abcd>", return_tensors="pt").input_ids
    logits = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    assert logits.shape[:2] == (1, 5)


@pytest.mark.parametrize("when", ["start", "training"])
def test_interrupt_leaves_no_process_no_memory_and_a_usable_folder(
    tmp_path: Path, when: str
) -> None:
    run_dir = tmp_path / "run"
    before = _shared_memory()
    process = subprocess.Popen(
        _command(run_dir, "trainer.total_steps=100000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    awaited = run_dir / ("config.yaml" if when == "start" else "metrics.jsonl")
    deadline = time.monotonic() + 120
    while not (awaited.is_file() and awaited.stat().st_size):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert _shared_memory() == before
    assert _processes_of(run_dir) == []
    if when == "training":
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["step"] == len(rows)
        assert json.loads((run_dir / "summary.json").read_text())["steps"] == len(rows)
        assert (run_dir / "model" / "config.json").is_file()


def test_two_ranks_train_through_ray(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = _command(
        run_dir, "trainer.total_steps=3", "trainer.num_devices=2", "cluster.devices_per_node=3"
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 3


def test_wrong_settings_start_nothing_and_exit_with_2(tmp_path: Path) -> None:
    command = _command(tmp_path / "run", "algorithm.group_size=1", "trainer.num_devces=2")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "did you mean num_devices?" in done.stderr or "trainer.num_devices" in done.stderr
    assert not (tmp_path / "run").exists()
