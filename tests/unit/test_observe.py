"""Run folder, trackers, live screen and closing report."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from asyncrl.config import Config, ConfigError
from asyncrl.config_file import load
from asyncrl.observe.live import Screen, Snapshot
from asyncrl.observe.metrics import REQUIRED, open_trackers, read_metrics
from asyncrl.observe.report import Summary, summarize
from asyncrl.observe.run_folder import RunFolder

MINE = "plugin_of_mine.any_family"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small legal configuration: bound 1."""
    values = {
        "model": {"random": {"max_positions": 64}},
        "data": {"type": MINE},
        "reward": {"type": MINE},
        "rollout": {"engine": {"type": MINE}},
        "algorithm": {"group_size": 4, "mini_batch_groups": 4, "loss": {"type": MINE}},
    }
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A screen, its clock, and the lines it has shown."""

    def __init__(self, *, is_terminal: bool = False) -> None:
        self.clock = Clock()
        self._out = io.StringIO()
        console = Console(file=self._out, force_terminal=is_terminal, width=100, color_system=None)
        # No heartbeat of its own within a test's time.
        self.screen = Screen(console, clock=self.clock, tick_s=3600)

    def lines(self) -> list[str]:
        """The lines since the last call."""
        text = self._out.getvalue()
        self._out.truncate(0)
        self._out.seek(0)
        return text.splitlines()


def snapshot(step: int, *, total: int = 100) -> Snapshot:
    """The state of a run after a step."""
    return Snapshot(
        step=step,
        total_steps=total,
        metrics={
            "reward/mean": 0.25,
            "loss": -0.5,
            "rollout/tokens_per_s": 1234.4,
            "staleness/token_mean": 0.75,
            "staleness/token_max": 1.0,
            "staleness/bound": 2.0,
        },
        buffer={"num_in_flight": 7, "num_slots": 32},
        trainer_state="training",
        rollout_state="24 running, 8 waiting",
    )


def step_metrics(step: int, *, reward: float) -> dict[str, float]:
    """The metrics of a step as metrics.jsonl has them."""
    return {
        "step": step,
        "policy_version": step - 1,
        "reward/mean": reward,
        "loss": 0.5,
        "staleness/token_mean": 0.5,
        "staleness/token_max": 1.0 if step > 1 else 0.0,
        "staleness/bound": 1.0,
        "trainer/idle_share": 0.25,
        "trainer/wait_s": 1.0,
        "trainer/step_s": 3.0,
        "rollout/tokens_per_s": 100.0 * step,
        "rollout/tokens": 1050.0 * step,
        "time/elapsed_s": float(step),
    }


def test_run_folder_is_named_after_run_and_time(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(base, ["run.name=letters"])
    folders = [RunFolder.create(config) for _ in range(3)]
    assert len({folder.root for folder in folders}) == 3
    for folder in folders:
        assert re.fullmatch(r"runs/letters-\d{8}-\d{6}(-\d)?", folder.root.as_posix())
        assert load(folder.config) == config
        assert folder.logs.is_dir()


def test_run_folder_of_another_run_is_never_taken(base: Path, tmp_path: Path) -> None:
    config = load(base, [f"run.dir={tmp_path / 'run'}"])
    folder = RunFolder.create(config)
    assert folder.root == tmp_path / "run"
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder.create(config)


def test_metrics_are_on_disk_after_each_step(base: Path, tmp_path: Path) -> None:
    (tracker,) = open_trackers(load(base, ["trackers=[{type: jsonl}]"]), run_dir=tmp_path)
    rows = [step_metrics(step, reward=0.5) for step in (1, 2)]
    for count, row in enumerate(rows, start=1):
        tracker.log(row, int(row["step"]))
        assert read_metrics(tmp_path / "metrics.jsonl") == rows[:count]
    tracker.close()
    assert set(rows[0]) >= set(REQUIRED)


def test_metrics_stay_json_when_a_number_is_not_finite(base: Path, tmp_path: Path) -> None:
    (tracker,) = open_trackers(load(base, ["trackers=[{type: jsonl}]"]), run_dir=tmp_path)
    tracker.log({"loss": float("nan"), "a": float("inf"), "b": 1}, 3)
    tracker.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 3, "loss": null, "a": null, "b": 1}\n'


def test_tensorboard_holds_each_metric_of_each_step(base: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = open_trackers(load(base, ["trackers=[{type: tensorboard}]"]), run_dir=tmp_path)
    for step in (1, 2):
        tracker.log(step_metrics(step, reward=step / 4), step)
    tracker.close()
    events = EventAccumulator(str(RunFolder(tmp_path).tensorboard)).Reload()
    points = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert points == [(1, 0.25), (2, 0.5)]
    assert "step" not in events.Tags()["scalars"]


def test_start_up_steps_are_named_with_the_time_they_began() -> None:
    watched = Watched()
    watched.screen.phase("starting Ray")
    watched.clock.now += 12.34
    watched.screen.phase("loading the model")
    watched.screen.close()
    assert watched.lines() == ["[   0.0 s] starting Ray", "[  12.3 s] loading the model"]


def test_waiting_is_never_silent_for_five_seconds() -> None:
    watched = Watched()
    watched.screen.phase("starting Ray")
    watched.lines()
    silence, longest = 0.0, 0.0
    for _ in range(60):
        watched.clock.now += 0.5
        silence += 0.5
        watched.screen.heartbeat()
        if watched.lines():
            silence = 0.0
        longest = max(longest, silence)
    watched.screen.close()
    assert 3 < longest < 5


def test_heartbeat_names_what_is_waited_for_and_how_long() -> None:
    watched = Watched()
    watched.clock.now += 2
    watched.screen.phase("starting Ray")
    watched.clock.now += 4
    watched.screen.heartbeat()
    watched.screen.close()
    assert watched.lines()[1:] == ["[   6.0 s]   still: starting Ray (4 s)"]


def test_heartbeat_ends_with_the_first_step_but_for_slow_ones() -> None:
    watched = Watched()
    watched.screen.phase("starting Ray")
    watched.screen.update(snapshot(1))
    watched.lines()
    watched.clock.now += 29
    watched.screen.heartbeat()
    assert watched.lines() == []
    watched.clock.now += 1
    watched.screen.heartbeat()
    watched.screen.heartbeat()
    watched.screen.close()
    (line,) = watched.lines()
    assert line.startswith("step 1/100")


def test_plain_line_shows_every_figure() -> None:
    watched = Watched()
    watched.screen.update(snapshot(1))
    watched.clock.now += 10
    watched.lines()
    watched.screen.update(snapshot(11))
    watched.screen.close()
    assert watched.lines() == [
        "step 11/100  reward 0.250  loss -0.5000  tokens/s 1,234  "
        "staleness mean 0.75, max 1 of 2  buffer 7 of 32 slots  trainer training  "
        "rollout 24 running, 8 waiting  ETA 01:29"
    ]


@pytest.mark.parametrize(("share", "is_shown"), [(0.5, False), (0.876, True)])
def test_rejection_of_most_trajectories_is_shown(share: float, is_shown: bool) -> None:
    watched = Watched()
    metrics = {"correction/rejected_sequence_fraction": share}
    watched.screen.update(Snapshot(1, 1, metrics, {}, "training", "0 running"))
    watched.screen.close()
    [line] = watched.lines()
    assert ("  rejected 88 %  " in line) is is_shown
    assert ("rejected" in line) is is_shown


@pytest.mark.parametrize(
    ("seconds_a_step", "shown"),
    [(0.0, [10, 20, 30, 40, 50, 60, 70, 80, 90, 95]), (1.0, [2, 4, 6, 8])],
    ids=["fast steps: each tenth and the last", "slow steps: every two seconds"],
)
def test_plain_lines_are_few(seconds_a_step: float, shown: list[int]) -> None:
    watched = Watched()
    watched.screen.phase("start")
    watched.lines()
    total, count = (100, 96) if not seconds_a_step else (1000, 10)
    seen = []
    for step in range(1, count):
        watched.clock.now += seconds_a_step
        watched.screen.update(snapshot(step, total=total if step < 95 else 95))
        seen.extend(int(line.split()[1].split("/")[0]) for line in watched.lines())
    watched.screen.close()
    assert seen == shown


def test_terminal_shows_a_live_display_with_the_same_figures() -> None:
    watched = Watched(is_terminal=True)
    watched.screen.update(snapshot(1))
    watched.clock.now += 10
    watched.screen.update(snapshot(11))
    watched.screen.warn("a rollout failed")
    watched.screen.close()
    text = "\n".join(watched.lines())
    for figure in (
        "step 11/100",
        "00:10 elapsed, ETA 01:29",
        "mean 0.75, max 1 of 2",
        "7 of 32 slots",
        "24 running, 8 waiting",
        "warning: a rollout failed",
    ):
        assert figure in text


def test_live_displays_clock_goes_on_between_steps() -> None:
    watched = Watched(is_terminal=True)
    watched.screen.update(snapshot(1))
    watched.lines()
    watched.clock.now += 65
    watched.screen.heartbeat()
    watched.screen.close()
    assert "01:05 elapsed" in "\n".join(watched.lines())


def test_screen_shows_figures_that_are_not_there_as_a_dash() -> None:
    watched = Watched()
    watched.screen.update(Snapshot(1, 1, {}, {}, "waiting", "0 running"))
    watched.screen.close()
    assert watched.lines()[0].startswith("step 1/1  reward -  loss -  tokens/s -")


def test_text_with_brackets_is_shown_as_it_is() -> None:
    watched = Watched()
    watched.screen.phase("[bold] is no markup")
    watched.screen.close()
    assert watched.lines() == ["[   0.0 s] [bold] is no markup"]


def compared(config: Config, *, wall_s: float, root: Path = Path("this")) -> Summary:
    """The summary of a run of one step that took so long."""
    return summarize(
        config,
        folder=RunFolder(root),
        steps=[step_metrics(1, reward=0.5)],
        validations=[],
        wall_s=wall_s,
    )


def test_summary_holds_means_of_what_was_recorded(base: Path) -> None:
    summary = summarize(
        load(base, ["trainer.total_steps=20"]),
        folder=RunFolder(Path("this")),
        steps=[step_metrics(step, reward=step / 20) for step in range(1, 21)],
        validations=[
            {"policy_version": 0, "reward/mean": 0.1},
            {"policy_version": 5, "reward/mean": 0.4},
            {"policy_version": 20, "reward/mean": 0.9},
        ],
        wall_s=12.0,
    )
    assert (summary.steps, summary.total_steps, summary.wall_s) == (20, 20, 12.0)
    assert summary.is_complete
    assert (summary.validation_reward_before, summary.validation_reward_after) == (0.1, 0.9)
    assert summary.train_reward_first == pytest.approx((1 + 2) / 40)
    assert summary.train_reward_last == pytest.approx((19 + 20) / 40)
    assert summary.tokens_per_s == pytest.approx(1050)
    assert summary.trainer_idle_share == 0.25
    assert (summary.staleness_mean, summary.staleness_max) == (0.5, 1.0)
    assert summary.staleness_bound == 1
    assert summary.speedup is None
    assert "with async.staleness_threshold=0" in summary.comparison


def test_run_that_ended_before_its_first_step_has_a_summary(base: Path, tmp_path: Path) -> None:
    folder = RunFolder.create(load(base, [f"run.dir={tmp_path / 'run'}"]))
    summary = summarize(load(base), folder=folder, steps=[], validations=[], wall_s=0.0)
    summary.write(folder.summary)
    assert summary.staleness_max is None
    assert ("reward, held-out prompts", "- → -") in summary.rows()
    assert not folder.is_finished()


def test_written_summary_is_on_disk_and_on_screen(base: Path, tmp_path: Path) -> None:
    config = load(base, [f"run.dir={tmp_path / 'r'}", "trainer.total_steps=1"])
    folder = RunFolder.create(config)
    summary = summarize(
        config,
        folder=folder,
        steps=[step_metrics(1, reward=0.5)],
        validations=[
            {"policy_version": 0, "reward/mean": 0.125},
            {"policy_version": config.num_versions, "reward/mean": 0.875},
        ],
        wall_s=3.0,
    )
    summary.write(folder.summary)
    values = json.loads(folder.summary.read_text())
    assert values["validation_reward_after"] == 0.875
    assert values["is_complete"] is True
    assert folder.is_finished()
    out = io.StringIO()
    summary.show(Console(file=out, width=100))
    for figure in ("0.125 → 0.875", "25.0%", "mean 0.50, max 0, bound 1", "3.0 s", "run folder"):
        assert figure in out.getvalue()


@pytest.fixture
def synchronous(base: Path, tmp_path: Path) -> RunFolder:
    """A finished synchronous run of one step and 30 s."""
    config = load(
        base,
        [
            "async.staleness_threshold=0",
            f"run.dir={tmp_path / 'sync'}",
            "trainer.total_steps=1",
        ],
    )
    folder = RunFolder.create(config)
    compared(config, wall_s=30.0).write(folder.summary)
    return folder


def test_speedup_is_the_ratio_of_wall_times_and_names_both_bounds(
    base: Path, synchronous: RunFolder
) -> None:
    config = load(
        base, [f"run.compare_to={synchronous.root}", "run.name=other", "trainer.total_steps=1"]
    )
    summary = compared(config, wall_s=20.0)
    assert summary.speedup == 1.5
    assert summary.comparison == (
        f"1.50× faster than {synchronous.root} (30.0 s with async.staleness_threshold=0, bound 0; "
        "here 20.0 s with 1, bound 1)"
    )
    slower = compared(config, wall_s=60.0)
    assert slower.speedup == 0.5
    assert slower.comparison.startswith("0.50× the speed of")


def test_a_synchronous_run_in_the_same_folder_is_found(base: Path, synchronous: RunFolder) -> None:
    beside = synchronous.root.parent / "async"
    config = load(base, ["trainer.total_steps=1", f"run.dir={beside}"])
    summary = compared(config, wall_s=15.0, root=beside)
    assert summary.speedup == 2.0
    other = load(base, ["trainer.total_steps=1", "trainer.lr=0.5", f"run.dir={beside}"])
    assert compared(other, wall_s=15.0, root=beside).speedup is None


def test_folders_beside_a_run_that_are_none_of_ours_do_not_matter(
    base: Path, synchronous: RunFolder
) -> None:
    beside = synchronous.root.parent
    for name, text in [("foreign", '{"accuracy": 1}'), ("list", "[1]"), ("broken", "{")]:
        (beside / name).mkdir()
        (beside / name / "summary.json").write_text(text)
        (beside / name / "config.yaml").write_text("a: 1")
    config = load(base, ["trainer.total_steps=1", f"run.dir={beside / 'async'}"])
    assert compared(config, wall_s=15.0, root=beside / "async").speedup == 2.0


def test_other_work_a_step_is_not_compared(base: Path, synchronous: RunFolder) -> None:
    overrides = ["trainer.total_steps=1", "async.require_batches=2"]
    config = load(base, [*overrides, f"run.compare_to={synchronous.root}"])
    summary = compared(config, wall_s=15.0)
    assert summary.comparison.endswith("async.require_batches differs")


def test_runs_that_differ_in_more_than_asynchrony_are_not_compared(
    base: Path, synchronous: RunFolder
) -> None:
    overrides = ["trainer.total_steps=1", "trainer.lr=0.5", "data.num_letters=5"]
    summary = compared(load(base, [f"run.compare_to={synchronous.root}", *overrides]), wall_s=20.0)
    assert summary.speedup is None
    assert summary.comparison == (
        f"not comparable with {synchronous.root}: data.num_letters differs, trainer.lr differs"
    )


def test_runs_on_different_machines_are_not_compared(base: Path, synchronous: RunFolder) -> None:
    values = json.loads(synchronous.summary.read_text())
    values["machine"]["host"] = "elsewhere"
    synchronous.summary.write_text(json.dumps(values))
    config = load(base, [f"run.compare_to={synchronous.root}", "trainer.total_steps=1"])
    summary = compared(config, wall_s=20.0)
    assert summary.speedup is None
    assert "it ran on another machine" in summary.comparison


def test_run_without_all_its_steps_is_not_compared(base: Path, synchronous: RunFolder) -> None:
    config = load(base, [f"run.compare_to={synchronous.root}", "trainer.total_steps=2"])
    summary = compared(config, wall_s=20.0)
    assert not summary.is_complete
    assert summary.speedup is None
    assert "did not make all its steps" in summary.comparison
