"""The main job as a user starts it: a command, real Ray, real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from asyncrl.observe.metrics import REQUIRED

_SMALL = [
    "algorithm.group_size=4",
    "algorithm.mini_batch_groups=4",
    "validation.num_prompts=8",
]


def _command(run_dir: Path, *overrides: str) -> list[str]:
    names = [f"run.dir={run_dir}", f"run.name={run_dir.name}"]
    return [sys.executable, "-m", "asyncrl.train", *_SMALL, *names, *overrides]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder whose name no other run on this machine has."""
    return tmp_path / f"run-{uuid.uuid4().hex[:8]}"


def _shared_memory(run_dir: Path) -> list[str]:
    """What a run has in shared memory: its buffer and its weights."""
    return [path.name for path in Path("/dev/shm").iterdir() if run_dir.name in path.name]


def _environment(run_dir: Path) -> dict[str, str]:
    """Marks a run and all that it starts, however it starts it."""
    return {**os.environ, "ASYNCRL_TEST_RUN": str(run_dir)}


def _processes_of(run_dir: Path) -> list[psutil.Process]:
    """Living processes that a run started, itself included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_marked = process.environ().get("ASYNCRL_TEST_RUN") == str(run_dir)
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """A run in a session of its own, with SIGINT ignored as in a shell script's background job."""
    return subprocess.Popen(
        _command(run_dir, *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=_environment(run_dir),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )


def _wait_for(file: Path, process: subprocess.Popen[str], *, num_lines: int) -> None:
    """Until the run has written that many lines to a file."""
    deadline = time.monotonic() + 120
    while not (file.is_file() and file.read_text().count("\n") >= num_lines):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"the run did not write {file}"
        time.sleep(0.05)


def test_main_job_runs_and_leaves_a_whole_run_folder(run_dir: Path) -> None:
    command = _command(run_dir, "trainer.total_steps=6", "async.rollout_correction=sequence_tis")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=_environment(run_dir),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert set(REQUIRED) <= rows[-1].keys()
    assert all(row["staleness/token_max"] <= row["staleness/bound"] for row in rows)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 6
    (staleness,) = [line for line in done.stdout.splitlines() if "│ staleness " in line]
    assert f"bound {summary['staleness_bound']}" in staleness
    assert _shared_memory(run_dir) == []
    assert _processes_of(run_dir) == []
    _loads_in_transformers(run_dir / "model")


def _loads_in_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("abcd>", return_tensors="pt").input_ids
    logits = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    assert logits.shape[:2] == (1, 5)


@pytest.mark.parametrize(
    ("when", "stop"),
    [
        ("start", signal.SIGINT),
        ("starting Ray", signal.SIGINT),
        ("training", signal.SIGINT),
        ("training", signal.SIGTERM),
    ],
)
def test_interrupt_leaves_no_process_no_memory_and_a_usable_folder(
    run_dir: Path, when: str, stop: signal.Signals
) -> None:
    process = _start(run_dir, "trainer.total_steps=100000")
    if when == "starting Ray":
        assert process.stdout is not None
        assert any(when in line for line in process.stdout)  # reads up to that line
    else:
        # By step 9 versions have been published: the bound does not allow otherwise.
        file, num_lines = ("config.yaml", 1) if when == "start" else ("metrics.jsonl", 9)
        _wait_for(run_dir / file, process, num_lines=num_lines)
    assert len(_processes_of(run_dir)) >= 1
    if stop == signal.SIGINT:
        os.killpg(process.pid, stop)  # what a terminal does on Ctrl-C
    else:
        process.send_signal(stop)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert _shared_memory(run_dir) == []
    assert _processes_of(run_dir) == []
    if when == "training":
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["step"] == len(rows)
        assert json.loads((run_dir / "summary.json").read_text())["steps"] == len(rows)
        assert (run_dir / "model" / "config.json").is_file()
        _loads_in_transformers(run_dir / "model")


@pytest.mark.parametrize(
    ("title", "name"),
    [("ray::_RolloutActor", "rollout-0"), ("ray::_TrainerActor", "trainer rank 0")],
)
def test_a_killed_part_ends_the_run_by_name_and_leaves_nothing(
    run_dir: Path, title: str, name: str
) -> None:
    process = _start(run_dir, "trainer.total_steps=100000")
    _wait_for(run_dir / "metrics.jsonl", process, num_lines=1)
    (victim,) = [p for p in _processes_of(run_dir) if " ".join(p.cmdline()).startswith(title)]
    victim.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert f"{name} died" in output
    assert _shared_memory(run_dir) == []
    assert _processes_of(run_dir) == []


def test_a_spent_failure_budget_is_named_through_ray(run_dir: Path) -> None:
    command = _command(
        run_dir, "rollout.max_failures=0", "reward={type: tests.integration.failing_reward}",
        "validation.num_prompts=0",
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "rollout.max_failures=0 are allowed" in " ".join(done.stdout.split())


def test_two_ranks_train_through_ray(run_dir: Path) -> None:
    command = _command(
        run_dir, "trainer.total_steps=3", "trainer.num_devices=2", "cluster.devices_per_node=3"
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 3


def test_wrong_settings_start_nothing_and_exit_with_2(run_dir: Path) -> None:
    command = _command(run_dir, "algorithm.group_size=1", "trainer.num_devces=2")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "unknown key trainer.num_devces; did you mean num_devices?" in done.stderr
    assert "algorithm.group_size=1" in done.stderr
    assert not (run_dir).exists()
