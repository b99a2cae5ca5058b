"""One rollout process: an engine, the rollouter that feeds it, and the loop that admits prompts.

Knows no ray; `asyncrl.cluster` puts it into an actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl import plugins
from asyncrl.buffer import BufferClosed, TrajectoryBuffer
from asyncrl.config import Config
from asyncrl.deadline import within
from asyncrl.errors import first_error
from asyncrl.interfaces import Engine
from asyncrl.rollout.rollouter import Rollouter


class RolloutWorker:
    """Implements `asyncrl.interfaces.RolloutWorker`.

    consumes: slots of the buffer; produces: prompt groups; waits for: a free slot, the engine,
    the reward; unblocked by: `stop`, or the buffer's end.
    """

    def __init__(
        self, config: Config, *, index: int, model_folder: Path, buffer_name: str, run_dir: Path
    ) -> None:
        self._config = config
        self._index = index
        self._model_folder = model_folder
        self._buffer_name = buffer_name
        self._run_dir = run_dir
        self._running: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._engine: Engine | None = None
        self._rollouter: Rollouter | None = None

    async def start(self) -> None:
        """Loads the model and attaches to the buffer."""
        config = self._config
        devices = plugins.load("devices", config.device)
        module = plugins.load("engines", config.rollout.engine.type)
        engine = module.Engine(
            config.rollout.engine.settings("engines"),
            model_folder=self._model_folder,
            log_folder=self._run_dir / "logs" / f"rollout-{self._index}",
            seed=config.run.seed,
            num_threads=config.rollout.num_threads,
            device=devices.Device(devices.Config()).type,
            max_model_len=config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
        )
        self._engine = engine
        start_s = config.deadlines.start_s
        await within(engine.start(), start_s, "the engine to start (deadlines.start_s)")
        self._buffer = TrajectoryBuffer.attach(self._buffer_name)
        self._rollouter = Rollouter(
            config, engine=engine, buffer=self._buffer, model_folder=self._model_folder
        )

    @property
    def rollouter(self) -> Rollouter:
        """What turns tickets into prompt groups; there once `start` is through."""
        assert self._rollouter is not None, "start() comes first"
        return self._rollouter

    @property
    def engine(self) -> Engine:
        """The engine; there once `start` is through."""
        assert self._engine is not None, "start() comes first"
        return self._engine

    async def run(self) -> None:
        """Admits and rolls out prompt groups until `stop`, or until a group fails for good."""
        try:
            async with asyncio.TaskGroup() as groups:
                while not self._is_stopping:
                    ticket = await self._buffer.admit_async(self._config.slot_s)
                    task = groups.create_task(self.rollouter.run_group(ticket))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
        except* BufferClosed:
            # The run is over: what was still being generated stays unfinished.
            pass
        except* Exception as failures:
            raise first_error(failures) from failures

    async def load_weights(self, folder: Path, *, version: int) -> None:
        """Swaps the engine's weights, in flight where `async.partial_rollout` allows it."""
        await self.engine.load_weights(
            folder, version=version, keep_requests=self._config.asynchrony.partial_rollout
        )

    async def evaluate(self, prompt_indices: Sequence[int]) -> list[dict[str, Any]]:
        """Completions and rewards of validation prompts under the engine's current version."""
        return await self.rollouter.evaluate(prompt_indices)

    async def stats(self) -> dict[str, float]:
        """The engine's counters."""
        return self.engine.stats()

    async def drain_samples(self) -> list[dict[str, Any]]:
        """Sample completions since the last call, for the run folder."""
        return self.rollouter.drain_samples()

    async def stop(self) -> None:
        """Ends `run` and the engine; nothing is left running."""
        self._is_stopping = True
        for task in list(self._running):
            task.cancel()
        if self._rollouter is not None:
            await self._rollouter.close()
            self._buffer.detach()
        if self._engine is not None:
            await self._engine.close()
