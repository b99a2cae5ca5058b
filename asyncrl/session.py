"""One run's parts, built in order and taken down in reverse, whatever ended it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from asyncrl import plugins, preflight
from asyncrl.buffer import TrajectoryBuffer
from asyncrl.config import Config
from asyncrl.deadline import within
from asyncrl.observe import report
from asyncrl.observe.live import Screen
from asyncrl.observe.metrics import open_trackers
from asyncrl.observe.run_folder import RunFolder
from asyncrl.pipeline import Channel, Pipeline

if TYPE_CHECKING:
    from asyncrl.cluster import Cluster


class Session:
    """Owns what outlives a process: run folder, shared memory, Ray.

    Taken down in this order: the buffer closes (every waiter wakes), the model is saved, workers
    and ranks end, Ray ends, shared memory is freed. The run folder stays.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._console = Console()
        self.folder = RunFolder.create(config)
        self.screen = Screen(self._console)

    async def run(self) -> None:
        """The run, from the model folder to the summary."""
        config, screen = self._config, self.screen
        _end_on_sigterm()
        screen.phase(f"run folder {self.folder.root}")
        self._console.print(preflight.describe(config), highlight=False)
        screen.phase("preparing the model")
        model_folder = await asyncio.to_thread(self._prepare_model)
        with contextlib.ExitStack() as stack:
            channel = self._channel(stack)
            trackers = open_trackers(config, run_dir=self.folder.root)
            for tracker in trackers:
                stack.callback(tracker.close)
            buffer = self._buffer(stack)
            screen.phase("starting Ray")
            cluster = await asyncio.to_thread(self._cluster, model_folder, buffer.name)
            stack.callback(cluster.close)
            await _to_its_end(cluster.start)
            # Again, since Ray has just set a handler of its own, which would abort.
            _end_on_sigterm()
            pipeline = Pipeline(
                config,
                trainer=cluster.trainer,
                workers=cluster.workers,
                buffer=buffer,
                channel=channel,
                trackers=trackers,
                screen=screen,
                folder=self.folder,
            )
            try:
                await pipeline.run()
                await self._save_model(cluster)
            finally:
                # First of all: whoever waits for a slot or a batch wakes up and learns of the end.
                buffer.close()
                await self._end(pipeline, cluster, model_folder)

    def record_failure(self, error: BaseException) -> Path:
        """Writes the whole traceback into the run folder; returns the file."""
        path = self.folder.logs / "failure.txt"
        path.write_text("".join(traceback.format_exception(error)))
        return path

    def _prepare_model(self) -> Path:
        # Imported here: torch takes seconds, and by now the screen says what is going on.
        from asyncrl.trainer.model import prepare_model_folder

        folder = self.folder.root / "initial_model"
        return prepare_model_folder(self._config.model, folder, seed=self._config.run.seed)

    def _channel(self, stack: contextlib.ExitStack) -> Channel:
        section = self._config.weights
        module = plugins.load("weights", section.type)
        channel: Channel = module.Channel(section.settings("weights"), run_dir=self.folder.root)
        stack.callback(channel.close)
        return channel

    def _buffer(self, stack: contextlib.ExitStack) -> TrajectoryBuffer:
        config = self._config
        buffer = TrajectoryBuffer.create(
            f"{config.run.name}-{uuid.uuid4().hex[:8]}",
            staleness_threshold=config.asynchrony.staleness_threshold,
            groups_per_version=config.groups_per_version,
            lookahead=config.asynchrony.lookahead,
            capacity_bytes=config.buffer.capacity_bytes,
        )
        stack.callback(buffer.unlink)
        # Computed in C++ as well; a run under another bound than the one it shows proves nothing.
        computed = (buffer.num_slots, buffer.max_staleness)
        assert computed == (config.num_slots, config.max_staleness), computed
        return buffer

    def _cluster(self, model_folder: Path, buffer_name: str) -> Cluster:
        from asyncrl.cluster import Cluster

        return Cluster(
            self._config,
            model_folder=model_folder.resolve(),
            buffer_name=buffer_name,
            run_dir=self.folder.root.resolve(),
        )

    async def _save_model(self, cluster: Cluster) -> None:
        self.screen.phase("saving the model")
        part = self.folder.model.with_suffix(".part").resolve()
        await within(
            cluster.trainer.save_model(part),
            self._config.deadlines.publish_s,
            "the trainer to save the model (deadlines.publish_s)",
        )
        part.rename(self.folder.model)

    async def _end(self, pipeline: Pipeline, cluster: Cluster, model_folder: Path) -> None:
        """Ends the parts, says how it went; never hides why the run ended."""
        try:
            if not self.folder.model.exists():
                self._save_newest(pipeline.record.newest_weights, model_folder)
        except OSError as error:
            self.screen.warn(f"the published weights were not saved: {error}")
        self.screen.phase("stopping workers and ranks")
        for problem in await cluster.stop():
            self.screen.warn(problem)
        self.screen.close()
        summary = report.summarize(
            self._config,
            folder=self.folder,
            steps=pipeline.record.steps,
            validations=pipeline.record.validations,
            wall_s=pipeline.record.wall_s,
        )
        summary.write(self.folder.summary)
        summary.show(self._console)

    def _save_newest(self, weights: Path | None, model_folder: Path) -> None:
        """The trainer may be in the middle of a step when a run ends early; a version is whole."""
        if weights is None:
            return
        self.screen.phase(f"saving the published weights {weights.name}")
        copy_model(model_folder, self.folder.model, weights=weights)


def copy_model(source: Path, target: Path, *, weights: Path) -> None:
    """Makes `target` the model in `source` with other weights."""
    # The initial weights stay behind, their index too: an engine would read them first.
    initial = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "*.bin")
    shutil.copytree(source, target, ignore=initial)
    shutil.copytree(weights, target, dirs_exist_ok=True)


async def _to_its_end(work: Callable[[], None]) -> None:
    """Runs `work` in a thread; a cancelled caller too waits until it is through."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await running
        raise


def _end_on_sigterm() -> None:
    """Makes a batch system's SIGTERM end this process as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
