"""A run's parts in one process: real engine, trainer, buffer and pipeline, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.buffer import TrajectoryBuffer
from asyncrl.config import Config
from asyncrl.interfaces import StepReport
from asyncrl.observe.live import Screen
from asyncrl.observe.run_folder import RunFolder
from asyncrl.pipeline import Pipeline
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.trainer.model import prepare_model_folder
from asyncrl.trainer.rank import TrainerRank
from asyncrl.weights import shared_memory


class LocalWorker(RolloutWorker):
    """A rollout worker whose model is loaded while no other is.

    transformers patches module globals while it loads, which two threads at a time leave patched.
    """

    def __init__(self, config: Config, *, loading: asyncio.Lock, **places: Any) -> None:
        super().__init__(config, **places)
        self._loading = loading

    async def start(self) -> None:
        async with self._loading:
            await super().start()


class LocalTrainer:
    """One trainer rank in a thread, as a TrainerGroup."""

    def __init__(self, rank: TrainerRank, *, loading: asyncio.Lock) -> None:
        self._rank = rank
        self._loading = loading

    async def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        async with self._loading:
            await asyncio.to_thread(self._rank.start, f"tcp://127.0.0.1:{port}")

    async def step(self) -> StepReport:
        return await asyncio.to_thread(self._rank.step)

    async def export_weights(self, folder: Path) -> None:
        await asyncio.to_thread(self._rank.export_weights, folder)

    async def close(self) -> None:
        await asyncio.to_thread(self._rank.close)


@dataclass
class Parts:
    config: Config
    folder: RunFolder
    buffer: TrajectoryBuffer
    channel: shared_memory.Channel
    trainer: LocalTrainer
    worker: RolloutWorker

    def pipeline(self) -> Pipeline:
        return Pipeline(
            self.config,
            trainer=self.trainer,
            workers=[self.worker],
            buffer=self.buffer,
            channel=self.channel,
            trackers=[],
            screen=Screen(Console(file=io.StringIO())),
            folder=self.folder,
        )

    async def stop(self) -> None:
        self.buffer.close()
        await self.worker.stop()
        await self.trainer.close()


@contextlib.contextmanager
def build(config: Config) -> Iterator[Parts]:
    """All parts of a run of `config`, not yet started; shared memory is freed at the end."""
    folder = RunFolder.create(config)
    model_folder = prepare_model_folder(
        config.model, folder.root / "initial_model", seed=config.run.seed
    )
    buffer = TrajectoryBuffer.create(
        f"test-{uuid.uuid4().hex[:8]}",
        staleness_threshold=config.asynchrony.staleness_threshold,
        groups_per_version=config.groups_per_version,
        lookahead=config.asynchrony.lookahead,
        capacity_bytes=config.buffer.capacity_bytes,
    )
    channel = shared_memory.Channel(shared_memory.Config(), run_dir=folder.root)
    loading = asyncio.Lock()
    places: dict[str, Any] = {
        "model_folder": model_folder,
        "buffer_name": buffer.name,
        "run_dir": folder.root,
    }
    try:
        yield Parts(
            config,
            folder,
            buffer,
            channel,
            LocalTrainer(TrainerRank(config, rank=0, num_ranks=1, **places), loading=loading),
            LocalWorker(config, index=0, loading=loading, **places),
        )
    finally:
        channel.close()
        buffer.unlink()
