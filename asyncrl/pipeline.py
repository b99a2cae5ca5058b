"""The loops of a run and the order in which they end. No ray in it.

      rollout workers ──put group──►  buffer  ──take batch──►  trainer ranks
            ▲                      (slots, bound)                   │ every T steps
            └───────── load version v ◄── publish ◄── weights of v ─┘
                            └── slots of version v go back

The loops run side by side and meet only in the buffer and in two queues: `_train` makes steps,
`_publish` brings versions to the engines, `_report` tells the user; each worker's own `run` rolls
out.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

from asyncrl.buffer import TrajectoryBuffer
from asyncrl.config import Config
from asyncrl.deadline import DeadlineExceeded, within
from asyncrl.errors import first_error
from asyncrl.interfaces import RolloutWorker, StepReport, Tracker, TrainerGroup
from asyncrl.observe.live import Screen, Snapshot
from asyncrl.observe.run_folder import RunFolder

T = TypeVar("T")


class RunFailed(RuntimeError):
    """A run that cannot go on: what was waited for, and the state of its parts."""


class Channel(Protocol):
    """The weight plug-in's end in the driver (see `asyncrl.weights`)."""

    def folder(self, version: int) -> Path: ...

    def discard(self, version: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class Record:
    """What a run leaves behind for its summary."""

    steps: list[Mapping[str, float]] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)
    newest_weights: Path | None = None
    """Folder with the weights that the engines hold; None before the first publication."""
    wall_s: float = 0.0
    """From the first rollout to the last publication; 0 when that was not reached. Start-up and
    the validations before and after are outside."""


class Pipeline:
    """One run over parts that are already built.

    consumes: nothing; produces: trained weights and a Record; waits for: its parts, each under a
    deadline; unblocked by: the end of the run, a part's failure, cancellation.
    """

    def __init__(
        self,
        config: Config,
        *,
        trainer: TrainerGroup,
        workers: Sequence[RolloutWorker],
        buffer: TrajectoryBuffer,
        channel: Channel,
        trackers: Sequence[Tracker],
        screen: Screen,
        folder: RunFolder,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._workers = workers
        self._buffer = buffer
        self._channel = channel
        self._trackers = trackers
        self._screen = screen
        self._folder = folder
        self._versions: asyncio.Queue[int | None] = asyncio.Queue()
        self._reports: asyncio.Queue[StepReport | None] = asyncio.Queue()
        self._trainer_state = "waiting"
        self._validations: asyncio.Queue[int | None] = asyncio.Queue()
        self._num_tokens_before = 0.0
        self._tokens_at = (0.0, 0.0)
        self.record = Record()

    async def run(self) -> Record:
        """The whole run; raises what ended it early."""
        await self._start()
        await self._validate(version=0)
        self._num_tokens_before = sum(s["num_generated_tokens"] for s in await self._stats())
        self._screen.phase("rollouts and training start")
        started = time.monotonic()
        await self._loops(started)
        await self._validate(version=self._config.num_versions)
        return self.record

    async def _start(self) -> None:
        deadline = self._config.deadlines.start_s
        self._screen.phase(
            f"loading the model: {len(self._workers)} engine(s), "
            f"{self._config.trainer.num_devices} trainer rank(s)"
        )
        await self._within(
            asyncio.gather(self._trainer.start(), *(worker.start() for worker in self._workers)),
            deadline,
            "the engines and trainer ranks to load the model (deadlines.start_s)",
        )

    async def _loops(self, started: float) -> None:
        """All loops until the last version is loaded; rollouts end with the others."""
        rollouts = [asyncio.ensure_future(worker.run()) for worker in self._workers]
        try:
            async with asyncio.TaskGroup() as loops:
                watch = loops.create_task(self._watch(rollouts))
                work = (self._publish(), self._report(started), self._validate_meanwhile())
                tasks = [loops.create_task(loop) for loop in (*work, self._train())]
                await asyncio.wait(tasks)
                watch.cancel()
            self.record.wall_s = time.monotonic() - started
        except* Exception as failures:
            raise first_error(failures) from failures
        finally:
            for task in rollouts:
                task.cancel()
            await asyncio.gather(*rollouts, return_exceptions=True)

    async def _watch(self, rollouts: Sequence[asyncio.Future[None]]) -> None:
        """Raises what ended a rollout loop: none ends by itself before the run."""
        done, _ = await asyncio.wait(rollouts, return_when=asyncio.FIRST_COMPLETED)
        error = next((task.exception() for task in done), None)
        raise RunFailed(f"a rollout worker failed: {error}") from error

    async def _train(self) -> None:
        """consumes: batches; produces: versions; waits for: the trainer; unblocked by: its end."""
        config = self._config
        patience = config.completion_s + config.deadlines.step_s
        version = 0
        for step in range(1, config.trainer.total_steps + 1):
            self._trainer_state = "training"
            report = await self._within(self._trainer.step(), patience, f"optimizer step {step}")
            self._reports.put_nowait(report)
            is_last = step == config.trainer.total_steps
            if step % config.asynchrony.trigger_parameter_sync_step == 0 or is_last:
                version += 1
                await self._cut(version)
        self._versions.put_nowait(None)
        self._reports.put_nowait(None)

    async def _cut(self, version: int) -> None:
        self._trainer_state = f"writing version {version}"
        await self._within(
            self._trainer.export_weights(self._channel.folder(version)),
            self._config.deadlines.publish_s,
            f"the trainer to write policy version {version} (deadlines.publish_s)",
        )
        self._buffer.cut_version(version)
        self._versions.put_nowait(version)

    async def _publish(self) -> None:
        """consumes: versions; produces: free slots; waits for: the engines; unblocked by: `_train`.

        Training goes on meanwhile. When versions have queued up only the newest is loaded; the
        slots of all of them go back together. The newest stays until the next, so that an
        interrupted run has weights to save.
        """
        is_over, newest = False, 0
        while not is_over:
            queued = [await self._versions.get()]
            while not self._versions.empty():
                queued.append(self._versions.get_nowait())
            is_over = queued[-1] is None
            versions = [version for version in queued if version is not None]
            if versions:
                await self._load(versions[-1])
                for version in [newest, *versions[:-1]]:
                    self._channel.discard(version)
                newest = versions[-1]
                self.record.newest_weights = self._channel.folder(newest)
        self._validations.put_nowait(None)

    async def _load(self, version: int) -> None:
        folder = self._channel.folder(version)
        await self._within(
            asyncio.gather(*(w.load_weights(folder, version=version) for w in self._workers)),
            self._config.load_s,
            f"the engines to load policy version {version} (deadlines.publish_s)",
        )
        self._buffer.set_version(version)
        self._buffer.assert_books_balance()
        every = self._config.validation.every_versions
        if every and version % every == 0 and version < self._config.num_versions:
            self._validations.put_nowait(version)

    async def _validate_meanwhile(self) -> None:
        """consumes: versions due; produces: records; waits for: answers; unblocked by: `_publish`.

        Rollouts and publications go on, so later answers may come from a later version.
        """
        while (version := await self._validations.get()) is not None:
            await self._validate(version=version)

    async def _validate(self, *, version: int) -> None:
        num_prompts = self._config.validation.num_prompts
        if num_prompts == 0:
            return
        self._screen.phase(
            f"validation on {num_prompts} held-out prompts, policy version {version}"
        )
        shares = [range(i, num_prompts, len(self._workers)) for i in range(len(self._workers))]
        answers = await self._within(
            asyncio.gather(
                *(w.evaluate(list(s)) for w, s in zip(self._workers, shares, strict=True))
            ),
            self._config.completion_s,
            "validation answers (deadlines.generate_s, reward_s, publish_s)",
        )
        samples = [sample for share in answers for sample in share]
        reward = sum(sample["reward"] for sample in samples) / len(samples)
        self.record.validations.append({"policy_version": version, "reward/mean": reward})
        self._write_samples([{**sample, "validation": True} for sample in samples[:8]])

    async def _report(self, started: float) -> None:
        """consumes: step reports; produces: metrics, samples, the screen; waits for: `_train`.

        A loop of its own, so that the trainer never waits for a worker to answer a question.
        """
        while (report := await self._reports.get()) is not None:
            await self._log(report.step, report.metrics, started)

    async def _log(self, step: int, metrics: Mapping[str, float], started: float) -> None:
        elapsed = time.monotonic() - started
        stats = await self._stats()
        tokens = sum(s["num_generated_tokens"] for s in stats) - self._num_tokens_before
        last_elapsed, last_tokens = self._tokens_at
        self._tokens_at = (elapsed, tokens)
        row = {
            **metrics,
            "step": step,
            "time/elapsed_s": elapsed,
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": (tokens - last_tokens) / max(elapsed - last_elapsed, 1e-9),
            "rollout/busy_s": sum(s["busy_s"] for s in stats),
            **_numbers(self._buffer.stats(), prefix="buffer/"),
        }
        self.record.steps.append(row)
        for tracker in self._trackers:
            tracker.log(row, step)
        self._write_samples(await self._samples())
        buffer = self._buffer.stats()
        self._screen.update(
            Snapshot(
                step=step,
                total_steps=self._config.trainer.total_steps,
                metrics=row,
                buffer=buffer,
                trainer_state=self._trainer_doing(buffer),
                rollout_state=", ".join(
                    f"{s['num_running']:.0f} running, {s['num_waiting']:.0f} waiting" for s in stats
                ),
            )
        )

    def _trainer_doing(self, buffer: Mapping[str, int]) -> str:
        num_leased, needed = buffer["num_leased"], self._config.groups_per_step
        if self._trainer_state == "training" and num_leased < needed:
            return f"waiting, {num_leased} of {needed} groups"
        return self._trainer_state

    async def _stats(self) -> list[dict[str, float]]:
        answers = asyncio.gather(*(worker.stats() for worker in self._workers))
        return await self._within(answers, self._config.deadlines.publish_s, "workers' counters")

    async def _samples(self) -> list[dict[str, Any]]:
        answers = asyncio.gather(*(worker.drain_samples() for worker in self._workers))
        seconds = self._config.deadlines.publish_s
        return list(chain.from_iterable(await self._within(answers, seconds, "sample completions")))

    def _write_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        with self._folder.completions.open("a") as out:
            out.writelines(json.dumps(sample) + "\n" for sample in samples)

    async def _within(self, work: Awaitable[T], deadline_s: float, what: str) -> T:
        try:
            return await within(work, deadline_s, what)
        except DeadlineExceeded as error:
            raise RunFailed(
                f"{error}; trainer: {self._trainer_state}; buffer: {self._buffer!r}"
            ) from error


def _numbers(stats: Mapping[str, Any], *, prefix: str) -> dict[str, float]:
    return {prefix + k: float(v) for k, v in stats.items() if isinstance(v, int | float)}
