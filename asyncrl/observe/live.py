"""What is seen while a run works: named start-up steps, then a live display or plain lines.

Only draws what the pipeline hands over; asks no part for anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_HEARTBEAT_S = 4.0
"""Longest silence while something is waited for."""
_LINE_S = 2.0
"""Least time between two plain lines of progress, unless a tenth of the steps was passed."""
_MUCH_REJECTED = 0.5
"""A step that rejects a greater share of its trajectories says so."""
_SLOW_STEP_S = 30.0
"""A step that takes longer repeats the last plain line, so that one sees it is alive."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after an optimizer step."""

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    """The step's metrics, named as in metrics.jsonl."""
    buffer: Mapping[str, Any]
    """`TrajectoryBuffer.stats()`; `num_in_flight` and `num_slots` are shown."""
    trainer_state: str
    """What the trainer does: waiting, training, writing version 3."""
    rollout_state: str
    """What the rollout pool does: 24 running, 8 waiting."""


class Screen:
    """The screen of one run. Safe to call from any thread.

    On a terminal steps are a live display, elsewhere single lines. A thread repeats what is being
    waited for, so that no start-up step is silent for more than five seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        tick_s: float = 1.0,
    ) -> None:
        """tick_s: seconds between two looks at whether a heartbeat is due."""
        self._console = console or Console()
        self._clock = clock
        self._tick_s = tick_s
        self._lock = threading.RLock()
        self._started = self._last_output = clock()
        self._waiting_for: str | None = None
        self._waiting_since = self._started
        self._live: Live | None = None
        self._snapshot: Snapshot | None = None
        self._first_step: tuple[float, int] | None = None
        self._shown_step = 0
        self._is_closed = threading.Event()
        self._ticker: threading.Thread | None = None

    def phase(self, text: str) -> None:
        """Names the step that begins now, with the time since the start of the program."""
        with self._lock:
            self._waiting_for, self._waiting_since = text, self._clock()
            self._print(f"[{self._clock() - self._started:6.1f} s] {text}")
            if self._ticker is None and not self._is_closed.is_set():
                self._ticker = threading.Thread(target=self._tick, name="screen", daemon=True)
                self._ticker.start()

    def heartbeat(self) -> None:
        """Repeats what is being waited for when nothing was shown for four seconds.

        Between two steps it moves the clock of the live display, or repeats a plain line when a
        step takes longer than half a minute.
        """
        with self._lock:
            now = self._clock()
            if self._live is not None and self._snapshot is not None:
                self._draw(self._snapshot)
            elif self._snapshot is not None and now - self._last_output >= _SLOW_STEP_S:
                self._print(_line(self._snapshot, eta_s=self._eta_s(self._snapshot)))
            if self._waiting_for is not None and now - self._last_output >= _HEARTBEAT_S:
                waited = now - self._waiting_since
                self._print(
                    f"[{now - self._started:6.1f} s]   still: {self._waiting_for} ({waited:.0f} s)"
                )

    def update(self, snapshot: Snapshot) -> None:
        """Shows the state after a step."""
        with self._lock:
            self._waiting_for = None
            self._snapshot = snapshot
            if self._first_step is None:
                self._first_step = (self._clock(), snapshot.step)
            if self._console.is_terminal:
                self._draw(snapshot)
            elif self._is_line_due(snapshot):
                self._shown_step = snapshot.step
                self._print(_line(snapshot, eta_s=self._eta_s(snapshot)))

    def warn(self, text: str) -> None:
        """Shows a warning above whatever else is on the screen."""
        with self._lock:
            self._print(f"warning: {text}", style="yellow")

    def close(self) -> None:
        """Ends the display and the thread; the last state stays on the screen."""
        self._is_closed.set()
        with self._lock:
            self._waiting_for = None
            if self._live is not None:
                self._live.stop()
                self._live = None
        if self._ticker is not None:
            self._ticker.join(timeout=5)

    def _tick(self) -> None:
        while not self._is_closed.wait(self._tick_s):
            self.heartbeat()

    def _print(self, text: str, *, style: str | None = None) -> None:
        self._last_output = self._clock()
        self._console.print(Text(text, style=style or ""), soft_wrap=True)

    def _draw(self, snapshot: Snapshot) -> None:
        picture = _picture(
            snapshot, eta_s=self._eta_s(snapshot), elapsed_s=self._clock() - self._started
        )
        if self._live is None:
            self._live = Live(picture, console=self._console, refresh_per_second=4)
            self._live.start()
        else:
            self._live.update(picture)

    def _is_line_due(self, snapshot: Snapshot) -> bool:
        tenths = [10 * step // snapshot.total_steps for step in (self._shown_step, snapshot.step)]
        return (
            tenths[0] != tenths[1]
            or snapshot.step == snapshot.total_steps
            or self._clock() - self._last_output >= _LINE_S
        )

    def _eta_s(self, snapshot: Snapshot) -> float | None:
        """Seconds left at the pace since the first step; None before there is a pace."""
        assert self._first_step is not None
        started, first = self._first_step
        done = snapshot.step - first
        if done == 0:
            return None
        return (self._clock() - started) / done * (snapshot.total_steps - snapshot.step)


def _figures(snapshot: Snapshot) -> dict[str, str]:
    """The figures that both kinds of display show, by name."""
    metrics = snapshot.metrics
    figures = {
        "reward": _number(metrics, "reward/mean", ".3f"),
        "loss": _number(metrics, "loss", ".4f"),
        "tokens/s": _number(metrics, "rollout/tokens_per_s", ",.0f"),
        "staleness": (
            f"mean {_number(metrics, 'staleness/token_mean', '.2f')}, "
            f"max {_number(metrics, 'staleness/token_max', '.0f')} "
            f"of {_number(metrics, 'staleness/bound', '.0f')}"
        ),
        "buffer": (
            f"{_number(snapshot.buffer, 'num_in_flight', '.0f')} of "
            f"{_number(snapshot.buffer, 'num_slots', '.0f')} slots"
        ),
    }
    rejected = metrics.get("correction/rejected_sequence_fraction", 0.0)
    if rejected > _MUCH_REJECTED:
        figures["rejected"] = f"{100 * rejected:.0f} %"
    return figures


def _line(snapshot: Snapshot, *, eta_s: float | None) -> str:
    figures = "  ".join(f"{name} {value}" for name, value in _figures(snapshot).items())
    return (
        f"step {snapshot.step}/{snapshot.total_steps}  {figures}  trainer {snapshot.trainer_state}"
        f"  rollout {snapshot.rollout_state}  ETA {_duration(eta_s)}"
    )


def _picture(snapshot: Snapshot, *, eta_s: float | None, elapsed_s: float) -> RenderableType:
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        f"step {snapshot.step}/{snapshot.total_steps}",
        ProgressBar(total=snapshot.total_steps, completed=snapshot.step, width=40),
        f"{_duration(elapsed_s)} elapsed, ETA {_duration(eta_s)}",
    )
    table = Table.grid(padding=(0, 2))
    for name, value in _figures(snapshot).items():
        table.add_row(Text(name, style="bold"), Text(value))
    table.add_row(Text("trainer", style="bold"), Text(snapshot.trainer_state))
    table.add_row(Text("rollout", style="bold"), Text(snapshot.rollout_state))
    return Panel(Group(bar, table), title="asyncrl", title_align="left")


def _number(values: Mapping[str, Any], key: str, spec: str) -> str:
    return format(float(values[key]), spec) if key in values else "-"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "--:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
