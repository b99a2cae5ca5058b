"""vLLM as an engine: AsyncLLM in this process, its engine core and workers in their own.

Knows vLLM's interface and the versions it was written for; what runs in vLLM's own workers is in
`_vllm_worker`. Token ids go in and come out; text, chat templates and rewards are others' business.

Exact versions. A token is stamped when its output reaches `generate`, so every output of the old
weights must have arrived before the stamp changes (`_drain`), and none of the new may exist yet
(the scheduler is paused until then).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, Field

from asyncrl.config import Config as RunConfig
from asyncrl.deadline import DeadlineExceeded, within
from asyncrl.engines._vllm_processes import descendants, environment, output_to, shared_memory
from asyncrl.engines._vllm_worker import WorkerExtension
from asyncrl.interfaces import Completion, GenerationRequest
from asyncrl.trajectory import FinishReason

_T = TypeVar("_T")
_SUPPORTED = ((0, 23), (0, 33))
"""vLLM versions this adapter was written for: from, to (exclusive)."""
_METHODS = (
    "generate",
    "pause_generation",
    "resume_generation",
    "reset_prefix_cache",
    "collective_rpc",
    "shutdown",
)
_MIN_BATCHED_TOKENS = 4096
"""Prompt tokens that vLLM takes up in one step, at least."""


class Config(BaseModel, frozen=True, extra="forbid"):
    type: Literal["vllm"] = "vllm"
    max_num_seqs: int = Field(default=64, ge=1)
    """Completions decoded at the same time."""
    kv_cache_bytes: int | None = Field(default=1 << 30, ge=1 << 20)
    """Memory for keys and values; null: what `memory_fraction` of the device leaves."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of the device's memory vLLM may use; counts only if `kv_cache_bytes` is null."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the model computes in."""
    enforce_eager: bool = True
    """Runs the model uncompiled: starts minutes earlier on a CPU, decodes slower on a GPU."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """Keys and values of running requests when weights change: computed again under the new
    weights, so that log-probs are those of the new policy; or kept (prefix caching is then off)."""
    start_timeout_s: float = Field(default=280, gt=0)
    """Below deadlines.start_s, so that vLLM's own message is the one that is seen."""
    drain_timeout_s: float = Field(default=300, gt=0)
    """How long running requests may take to finish when weights are not loaded in flight."""
    load_timeout_s: float = Field(default=30, gt=0)
    """Deadline of each step of a weight load: pause, load, reset, resume."""
    close_timeout_s: float = Field(default=8, gt=0)


def check_fit(config: RunConfig) -> None:
    """Raises ValueError for deadlines of vLLM that contradict those of the run."""
    mine, deadlines = config.rollout.engine.settings("engines"), config.deadlines
    # pause, load, reset, resume
    load_s = 4 * mine.load_timeout_s
    limits = [
        ("start_timeout_s", mine.start_timeout_s, "below deadlines.start_s", deadlines.start_s,
         mine.start_timeout_s < deadlines.start_s),
        ("load_timeout_s", mine.load_timeout_s, "at most a quarter of deadlines.publish_s",
         deadlines.publish_s, load_s <= deadlines.publish_s),
        ("drain_timeout_s", mine.drain_timeout_s, "at least deadlines.generate_s",
         deadlines.generate_s, mine.drain_timeout_s >= deadlines.generate_s),
    ]  # fmt: skip
    for name, value, legal, limit, is_legal in limits:
        if not is_legal:
            raise ValueError(
                f"rollout.engine.{name}={value:g} must be {legal} ({limit:g}); change one of them"
            )


class Engine:
    """One vLLM instance on one device. All calls come from one event loop."""

    def __init__(
        self,
        config: Config,
        *,
        model_folder: Path,
        log_folder: Path,
        seed: int,
        num_threads: int,
        device: str,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._model_folder = model_folder
        self._log_file = log_folder / "vllm_engine.log"
        self._seed = seed
        self._num_threads = num_threads
        self._device = device
        self._max_model_len = max_model_len
        self._llm: Any = None
        self._processes: list[Any] = []
        self._stop_tokens: list[int] = []
        self._version = 0
        self._num_running = 0
        self._num_generated_tokens = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._is_open = asyncio.Event()
        """Cleared while new requests must wait for a weight load that is not in flight."""
        self._is_idle = asyncio.Event()
        self._load_lock = asyncio.Lock()

    async def start(self) -> None:
        """Loads the model; the engine then holds policy version 0.

        Blocks the event loop meanwhile: vLLM binds its sockets to the loop it is built in.
        Raises RuntimeError for a vLLM this adapter does not know or that does not start in time.
        """
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with output_to(self._log_file), environment(self._variables()):
            try:
                self._llm = self._build()
            except Exception as error:
                raise RuntimeError(
                    f"vLLM did not start on {self._model_folder} ({error}); see {self._log_file}"
                ) from error
        self._processes = descendants()
        follow = self._llm.collective_rpc("asyncrl_follow", args=(os.getpid(),))
        await self._within(self._config.load_timeout_s, "load_timeout_s", "follow", follow)
        self._is_open.set()
        self._is_idle.set()

    async def generate(self, request: GenerationRequest) -> Completion:
        """Samples one completion; cancelling the call ends it in vLLM too."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._llm is None:
            raise RuntimeError("the vLLM engine is not running; await start() first")
        # A loop: between the event and this task's turn another load may have begun.
        while not self._is_open.is_set():
            await self._is_open.wait()
        sampling = SamplingParams(
            max_tokens=request.max_new_tokens,
            temperature=request.temperature,
            seed=request.seed,
            logprobs=0,
            detokenize=False,
            stop_token_ids=self._stop_tokens,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": request.prompt_tokens.tolist()}
        self._enter()
        try:
            return await self._collect(
                self._llm.generate(prompt, sampling, request_id=request.request_id)
            )
        finally:
            self._leave()

    async def load_weights(self, folder: Path, *, version: int, keep_requests: bool) -> None:
        """Takes the weights in `folder`; see `interfaces.Engine`.

        Raises ValueError for a version that is not above the present one, RuntimeError when vLLM
        refuses the weights, DeadlineExceeded naming the step that took too long. After either of
        the latter two the engine stays paused: what its workers hold is unknown.
        """
        async with self._load_lock:
            if version <= self._version:
                raise ValueError(f"version={version} must be above the engine's {self._version}")
            if not keep_requests:
                self._is_open.clear()
                config = self._config
                await self._within(
                    config.drain_timeout_s, "drain_timeout_s", "finish", self._is_idle.wait()
                )
            await self._swap(folder, version)
            self._is_open.set()

    def stats(self) -> dict[str, float]:
        """num_running, num_waiting, num_generated_tokens (cumulative), busy_s (cumulative)."""
        limit = self._config.max_num_seqs
        since = time.perf_counter() - self._busy_since if self._num_running else 0.0
        return {
            "num_running": float(min(self._num_running, limit)),
            "num_waiting": float(max(self._num_running - limit, 0)),
            "num_generated_tokens": float(self._num_generated_tokens),
            "busy_s": self._busy_s + since,
        }

    async def close(self) -> None:
        """Ends vLLM and each process it started; one that does not end by itself is killed."""
        if self._llm is None:
            return
        import psutil

        llm, self._llm = self._llm, None
        segments = await asyncio.to_thread(shared_memory, self._processes)
        with output_to(self._log_file):
            await asyncio.to_thread(llm.shutdown)
        timeout = self._config.close_timeout_s
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, timeout)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(psutil.wait_procs, alive, timeout)
        # vLLM kills a worker that is slow to end, which then leaves its queues in memory.
        for segment in segments:
            segment.unlink(missing_ok=True)

    def _build(self) -> Any:
        """The AsyncLLM; its log goes to the log file for good."""
        import logging

        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        _check_vllm(vllm.__version__, AsyncLLM)
        _check_platform(current_platform.device_type, device=self._device)
        config = self._config
        arguments = AsyncEngineArgs(
            model=str(self._model_folder),
            skip_tokenizer_init=True,
            dtype=config.dtype,
            seed=self._seed,
            max_model_len=self._max_model_len,
            max_num_seqs=config.max_num_seqs,
            gpu_memory_utilization=config.memory_fraction,
            kv_cache_memory_bytes=config.kv_cache_bytes,
            enforce_eager=config.enforce_eager,
            # vLLM rewinds a request's own generator when only a part of its prompt fits in a step,
            # which torch's CPU generator cannot: prompts go in whole, or wait for the next step.
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(_MIN_BATCHED_TOKENS, self._max_model_len),
            # Kept keys and values of the old weights must not be found by new requests.
            enable_prefix_caching=config.kv_on_update == "recompute",
            logprobs_mode="processed_logprobs",
            # The model folder's own top-k or temperature must not change what was asked for.
            generation_config="vllm",
            disable_log_stats=True,
            worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
        )
        self._stop_tokens = _stop_tokens(self._model_folder)
        llm = AsyncLLM.from_engine_args(arguments)
        # Last, since vLLM sets its own handlers up to here.
        logging.getLogger("vllm").handlers = [logging.FileHandler(self._log_file)]
        return llm

    def _variables(self) -> dict[str, str]:
        """vLLM has no other way to be told these."""
        threads = str(self._num_threads)
        return {
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_ENGINE_READY_TIMEOUT_S": str(int(self._config.start_timeout_s)),
            "VLLM_NO_USAGE_STATS": "1",
            # Pinned threads of several engines on one host would share the same first cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": threads,
            # `_drain` relies on one output message being handled without a pause.
            "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": str(max(self._config.max_num_seqs, 128)),
        }

    async def _collect(self, outputs: Any) -> Completion:
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason = None
        async for output in outputs:
            delta = output.outputs[0]
            tokens += delta.token_ids
            logprobs += [
                entry[token].logprob
                for token, entry in zip(delta.token_ids, delta.logprobs or [], strict=True)
            ]
            versions += [self._version] * len(delta.token_ids)
            self._num_generated_tokens += len(delta.token_ids)
            reason = delta.finish_reason
        if reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a request with {reason!r}; see {self._log_file}")
        return Completion(
            tokens=np.asarray(tokens, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            token_versions=np.asarray(versions, dtype=np.int32),
            finish_reason=FinishReason.STOP if reason == "stop" else FinishReason.LENGTH,
        )

    async def _swap(self, folder: Path, version: int) -> None:
        llm, deadline = self._llm, self._config.load_timeout_s
        recompute = self._config.kv_on_update == "recompute"
        name = "load_timeout_s"
        pause = llm.pause_generation(mode="keep", clear_cache=False)
        await self._within(deadline, name, "pause", pause)
        await self._within(deadline, name, "drain", self._drain())
        load = llm.collective_rpc("asyncrl_load", args=(str(folder),))
        await self._within(deadline, name, "load", load)
        if recompute:
            # Without running requests' keys and values the reset would only warn.
            reset = llm.reset_prefix_cache(reset_running_requests=True)
            if not await self._within(deadline, name, "reset", reset):
                raise RuntimeError(f"vLLM kept its prefix cache over version {version}")
        self._version = version
        await self._within(deadline, name, "resume", llm.resume_generation())

    async def _drain(self) -> None:
        """Returns when `_collect` has stamped every token sampled before the pause."""
        # The engine core sends its outputs and the pause's reply through one ordered socket, and
        # replies once idle; so by now all outputs are in this queue or past it. vLLM's handler
        # moves a message from the queue to the requests without awaiting (chunk size above), so
        # an empty queue means that every request has its tokens and its task is scheduled; tasks
        # run in the order they were scheduled, so one more turn of the loop runs them all.
        while not self._llm.engine_core.outputs_queue.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _within(self, seconds: float, setting: str, what: str, work: Awaitable[_T]) -> _T:
        name = f"vLLM step {what!r} (rollout.engine.{setting}); see {self._log_file}"
        try:
            return await within(work, seconds, name)
        except DeadlineExceeded:
            raise
        except Exception as error:
            raise RuntimeError(
                f"vLLM step {what!r} failed: {error}; see {self._log_file}"
            ) from error

    def _enter(self) -> None:
        if self._num_running == 0:
            self._busy_since = time.perf_counter()
            self._is_idle.clear()
        self._num_running += 1

    def _leave(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._busy_s += time.perf_counter() - self._busy_since
            self._is_idle.set()


def _check_vllm(version: str, llm_class: type) -> None:
    """RuntimeError for a vLLM outside the supported range, or without a method that is called."""
    low, high = _SUPPORTED
    major_minor = tuple(int(part) for part in version.split(".")[:2])
    supported = f"supported: >= {low[0]}.{low[1]}, < {high[0]}.{high[1]}"
    if not low <= major_minor < high:
        raise RuntimeError(f"vllm {version} is not supported; {supported}")
    if missing := [name for name in _METHODS if not hasattr(llm_class, name)]:
        raise RuntimeError(f"vllm {version} has no AsyncLLM.{missing[0]}; {supported}")


def _check_platform(device_type: str, *, device: str) -> None:
    """RuntimeError when vLLM, as installed here, computes on another type of device."""
    if device_type != device.partition(":")[0]:
        raise RuntimeError(
            f"device={device}, but the vLLM that is installed computes on {device_type!r}; install "
            f"vLLM built for {device}, or set device to the one it was built for"
        )


def _stop_tokens(model_folder: Path) -> list[int]:
    """End-of-sequence ids of the generation config, else of the model's own."""
    from transformers import AutoConfig, GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(model_folder).eos_token_id
    except OSError:
        ids = AutoConfig.from_pretrained(model_folder).eos_token_id
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)
