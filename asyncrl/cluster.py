"""Placement on Ray: actors for trainer ranks and rollout workers. Ray is imported here alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayTaskError

from asyncrl import plugins
from asyncrl.config import Config
from asyncrl.interfaces import StepReport
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.trainer.rank import TrainerRank

_OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum: trajectories and weights never go through it.

_GRACE_S = 5.0
"""How long processes may take to end by themselves once Ray is down."""


class PartFailed(RuntimeError):
    """A trainer rank or rollout worker raised or died; says which, and why."""


async def _result(ref: Any, part: str) -> Any:
    try:
        return await ref
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        raise PartFailed(f"{part}: {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        # Ray's own text is a page of ids; it stays in the traceback that the run folder keeps.
        raise PartFailed(
            f"{part} died (killed, or out of memory?); its last words are in the run folder's logs"
        ) from error


def _log_to_file(run_dir: Path, name: str) -> None:
    """Sends all that this process and its children print to a file of their own."""
    log = (run_dir / "logs" / f"{name}.log").open("a", buffering=1)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)


class _TrainerActor(TrainerRank):
    def redirect_output(self, run_dir: Path, name: str) -> None:
        _log_to_file(run_dir, name)


class _RolloutActor(RolloutWorker):
    async def redirect_output(self, run_dir: Path, name: str) -> None:
        _log_to_file(run_dir, name)


class RayTrainerGroup:
    """All trainer ranks; every call is entered by all of them in rank order."""

    def __init__(self, config: Config, *, model_folder: Path, buffer_name: str, run_dir: Path):
        options = plugins.load("devices", config.device).actor_options()
        self._run_dir = run_dir
        self._ranks = [
            ray.remote(_TrainerActor)
            .options(**options)
            .remote(
                config,
                rank=rank,
                num_ranks=config.trainer.num_devices,
                model_folder=model_folder,
                buffer_name=buffer_name,
                run_dir=run_dir,
            )
            for rank in range(config.trainer.num_devices)
        ]

    async def _all(self, method: str, *args: Any) -> list[Any]:
        refs = [getattr(actor, method).remote(*args) for actor in self._ranks]
        parts = [_result(ref, f"trainer rank {rank}") for rank, ref in enumerate(refs)]
        return list(await asyncio.gather(*parts))

    async def start(self) -> None:
        """Loads the model on every rank and joins them in one process group."""
        for rank, actor in enumerate(self._ranks):
            redirect = actor.redirect_output.remote(self._run_dir, f"trainer-{rank}")
            await _result(redirect, f"trainer rank {rank}")
        await self._all("start", f"tcp://127.0.0.1:{_free_port()}")

    async def step(self) -> StepReport:
        """One optimizer step; the report of rank 0, already reduced over ranks."""
        report: StepReport = (await self._all("step"))[0]
        return report

    async def export_weights(self, folder: Path) -> None:
        """Writes the current weights; rank 0 holds the pen, all ranks gather."""
        await self._all("export_weights", folder)

    async def save_model(self, folder: Path) -> None:
        """Writes a Hugging Face folder with the current weights."""
        await self._all("save_model", folder)

    async def close(self) -> None:
        """Leaves the process group and ends the ranks."""
        await self._all("close")


class RayRolloutWorker:
    """One rollout worker, as `asyncrl.interfaces.RolloutWorker`."""

    def __init__(
        self, config: Config, *, index: int, model_folder: Path, buffer_name: str, run_dir: Path
    ) -> None:
        options = plugins.load("devices", config.device).actor_options()
        self._name = f"rollout-{index}"
        self._run_dir = run_dir
        self._actor = (
            ray.remote(_RolloutActor)
            .options(**options, max_concurrency=64)
            .remote(
                config,
                index=index,
                model_folder=model_folder,
                buffer_name=buffer_name,
                run_dir=run_dir,
            )
        )

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        ref = getattr(self._actor, method).remote(*args, **kwargs)
        return await _result(ref, self._name)

    async def start(self) -> None:
        await self._call("redirect_output", self._run_dir, self._name)
        await self._call("start")

    async def run(self) -> None:
        ref = self._actor.run.remote()
        try:
            await _result(ref, self._name)
        finally:
            # Ray goes on with a task whose caller was cancelled, unless it is told.
            ray.cancel(ref)

    async def load_weights(self, folder: Path, *, version: int) -> None:
        await self._call("load_weights", folder, version=version)

    async def evaluate(self, prompt_indices: Sequence[int]) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = await self._call("evaluate", prompt_indices)
        return samples

    async def stats(self) -> dict[str, float]:
        stats: dict[str, float] = await self._call("stats")
        return stats

    async def drain_samples(self) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = await self._call("drain_samples")
        return samples

    async def stop(self) -> None:
        await self._call("stop")


class Cluster:
    """Ray, local or joined, and the actors of one run on it."""

    def __init__(self, config: Config, *, model_folder: Path, buffer_name: str, run_dir: Path):
        self._config = config
        self._places = {
            "model_folder": model_folder,
            "buffer_name": buffer_name,
            "run_dir": run_dir,
        }

    def start(self) -> None:
        """Starts or joins Ray and creates the actors; nothing is loaded yet."""
        config = self._config
        # Without these Ray spends seconds on a dashboard and writes to the user's screen.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        local: dict[str, Any] = {}
        if config.cluster.address is None:
            needed = config.rollout.num_devices + config.trainer.num_devices
            local = {
                "num_cpus": config.cluster.devices_per_node or needed,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "include_dashboard": False,
            }
        ray.init(
            address=config.cluster.address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **local,
        )
        self.trainer = RayTrainerGroup(config, **self._places)  # type: ignore[arg-type]
        self.workers = [
            RayRolloutWorker(config, index=index, **self._places)  # type: ignore[arg-type]
            for index in range(config.rollout.num_devices)
        ]

    async def stop(self) -> list[str]:
        """Ends workers and ranks within `deadlines.stop_s`; what went wrong, a line a part."""
        parts = {"trainer": self.trainer.close()}
        parts |= {f"rollout-{i}": worker.stop() for i, worker in enumerate(self.workers)}
        tasks = {asyncio.ensure_future(work): name for name, work in parts.items()}
        seconds = self._config.deadlines.stop_s
        done, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        too_late = [
            f"{tasks[t]} was ended by force after deadlines.stop_s={seconds:g}" for t in late
        ]
        return sorted(too_late + [str(t.exception()) for t in done if t.exception() is not None])

    def close(self) -> None:
        """Ends every process of this run, those that a killed worker left behind included."""
        family = psutil.Process().children(recursive=True)
        ray.shutdown()
        _, alive = psutil.wait_procs(family, timeout=_GRACE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
