"""The built-in engine: continuous batching of any Hugging Face causal language model, in-process.

For small models, a CPU and tests. It decides who decodes when; the tensors are `_slot_model`'s.
A completion's tokens and log-probabilities are bit-identical whatever else is in the batch,
whichever slot it gets and in whichever order requests arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
import traceback
from asyncio import Future
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from asyncrl.engines._slots import Pending, Slots
from asyncrl.interfaces import Completion, GenerationRequest
from asyncrl.trajectory import FinishReason

if TYPE_CHECKING:
    from asyncrl.engines._slot_model import SlotModel

_CLOSE_TIMEOUT_S = 60.0
"""Longer than any one decode step or weight load on a CPU."""


class Config(BaseModel, frozen=True, extra="forbid"):
    type: Literal["builtin"] = "builtin"
    num_slots: int = Field(default=64, ge=1)
    """Completions decoded at the same time. Every decode step runs that many rows, rounded up to a
    multiple of 16, busy or not."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """Keys and values of running requests when weights change: computed again, so that each
    token's log-probability is the one its own version gives the whole text before it; or kept."""


@dataclass(eq=False)
class _Update:
    """A `load_weights` call and the future that it awaits."""

    folder: Path
    version: int
    keep_requests: bool
    future: Future[None]


class Engine:
    """Continuous batching in one thread of its own. All calls come from one event loop.

    The thread consumes requests and weight updates and produces completions; when there are none
    it waits, without a deadline, and is unblocked by `generate`, `load_weights` and `close`.
    `seed` is not used: every request carries its own.
    """

    def __init__(
        self,
        config: Config,
        *,
        model_folder: Path,
        log_folder: Path,
        seed: int,  # noqa: ARG002
        num_threads: int,
        device: str,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._model_folder = model_folder
        self._log_file = log_folder / "builtin_engine.log"
        self._num_threads = num_threads
        self._device = device
        self._max_model_len = max_model_len
        self._model: SlotModel
        self._slots = Slots(config.num_slots, max_model_len)
        self._version = 0
        self._num_generated_tokens = 0
        self._busy_s = 0.0
        self._wake = threading.Condition()
        """Guards what callers and the thread share: the next four."""
        self._waiting: deque[Pending] = deque()
        self._updates: deque[_Update] = deque()
        self._is_closing = False
        self._end_cause: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop
        self._started: Future[None]
        self._results: list[tuple[Future[Any], Any]] = []
        """What the present step resolves; delivered at once, as each delivery wakes the loop."""
        self._thread = threading.Thread(target=self._run, name="builtin-engine", daemon=True)

    async def start(self) -> None:
        """Loads the model; the engine then holds policy version 0.

        Raises FileNotFoundError when there is no model and ValueError for one it cannot serve.
        """
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._thread.start()
        await self._started

    async def generate(self, request: GenerationRequest) -> Completion:
        """Samples one completion; cancelling the call frees its slot.

        Temperature 0 takes the likeliest token; its log-probability is then that at temperature 1.
        Raises ValueError for a request that cannot be served, RuntimeError once the engine failed
        or was closed.
        """
        self._check_running()
        self._check_request(request)
        pending = Pending(request, self._loop.create_future())
        with self._wake:
            self._check_running()
            self._waiting.append(pending)
            self._wake.notify()
        return await pending.future

    async def load_weights(self, folder: Path, *, version: int, keep_requests: bool) -> None:
        """Takes the weights in `folder` between two decode steps; see `interfaces.Engine`.

        Raises FileNotFoundError or ValueError when the weights do not fit or `version` is not
        above the present one; the engine then goes on with the weights it has.
        """
        self._check_running()
        update = _Update(folder, version, keep_requests, self._loop.create_future())
        with self._wake:
            self._check_running()
            self._updates.append(update)
            self._wake.notify()
        await update.future

    def stats(self) -> dict[str, float]:
        """num_running, num_waiting, num_generated_tokens (cumulative), busy_s (cumulative)."""
        return {
            "num_running": float(self._slots.num_running),
            "num_waiting": float(len(self._waiting)),
            "num_generated_tokens": float(self._num_generated_tokens),
            "busy_s": self._busy_s,
        }

    async def close(self) -> None:
        """Ends the thread after its current step; calls that still wait raise RuntimeError."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.ident is None:
            return
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the built-in engine's step did not end within {_CLOSE_TIMEOUT_S:.0f} s of close"
            )

    def _check_running(self) -> None:
        if self._end_cause is not None:
            raise RuntimeError(f"the built-in engine ended: {self._end_cause}") from self._end_cause
        if self._is_closing:
            raise RuntimeError("the built-in engine is closed; it takes no more calls")
        if self._thread.ident is None or not self._started.done():
            raise RuntimeError("the built-in engine has not started; await start() first")

    def _check_request(self, request: GenerationRequest) -> None:
        tokens, num_new = request.prompt_tokens, request.max_new_tokens
        where = f"request {request.request_id}"
        if len(tokens) == 0:
            raise ValueError(f"{where}: prompt_tokens is empty; give at least one token")
        if num_new < 1:
            raise ValueError(f"{where}: max_new_tokens={num_new} must be at least 1")
        if len(tokens) + num_new > self._max_model_len:
            raise ValueError(
                f"{where}: {len(tokens)} prompt tokens + max_new_tokens={num_new} exceed "
                f"max_model_len={self._max_model_len}; shorten the prompt, or raise "
                "rollout.max_prompt_tokens or rollout.max_response_tokens"
            )
        if tokens.min() < 0 or tokens.max() >= self._model.vocab_size:
            raise ValueError(
                f"{where}: prompt tokens range over {tokens.min()}..{tokens.max()}, the model's "
                f"vocabulary over 0..{self._model.vocab_size - 1}; use the model's own tokenizer"
            )
        if not (math.isfinite(request.temperature) and request.temperature >= 0):
            raise ValueError(
                f"{where}: temperature={request.temperature} must be a finite number >= 0"
            )

    def _run(self) -> None:
        """The thread: starts the model, then steps until `close` or a failure, then ends all."""
        try:
            self._load_model()
            self._results.append((self._started, None))
            self._deliver()
            while self._wait_for_work():
                began = time.perf_counter()
                self._step()
                self._deliver()
                self._busy_s += time.perf_counter() - began
            self._end(RuntimeError("the built-in engine was closed before this call ended"))
        except BaseException as error:
            # Whatever it was, callers must hear of it: nobody joins this thread to learn of it.
            self._log(traceback.format_exc())
            self._end(error)

    def _load_model(self) -> None:
        # Importing and setting threads here: torch counts CPU threads for the calling thread.
        import torch

        from asyncrl.engines._slot_model import SlotModel

        torch.set_num_threads(self._num_threads)
        self._model = SlotModel(
            self._model_folder,
            num_slots=len(self._slots.rows),
            max_model_len=self._max_model_len,
            device=self._device,
        )
        self._log(f"started: {self._model_folder}, {self._config}, {self._device}")

    def _wait_for_work(self) -> bool:
        """Blocks until there is something to do; False once the engine is to close."""
        with self._wake:
            self._wake.wait_for(
                lambda: (
                    self._is_closing
                    or self._updates
                    or self._waiting
                    or self._slots.is_active.any()
                )
            )
            return not self._is_closing

    def _step(self) -> None:
        self._drop_cancelled()
        self._apply_updates()
        if not self._updates:
            self._admit()
        if self._slots.is_active.any():
            self._decode()
            self._finish()

    def _drop_cancelled(self) -> None:
        for slot in self._slots.active():
            pending = self._slots.owners[slot]
            if pending is not None and pending.future.cancelled():
                self._slots.vacate(slot)

    def _apply_updates(self) -> None:
        """Loads every update that is due; one that keeps no requests waits for them to finish."""
        while self._updates:
            update = self._updates[0]
            if not update.keep_requests and self._slots.is_active.any():
                return
            self._apply(update)
            self._updates.popleft()

    def _apply(self, update: _Update) -> None:
        began = time.perf_counter()
        try:
            if update.version <= self._version:
                raise ValueError(
                    f"version={update.version} is not above version {self._version} that the "
                    "engine holds; publish versions in increasing order"
                )
            tensors = self._model.read_weights(update.folder)
        except Exception as error:
            self._log(f"version {update.version} refused: {error}")
            self._results.append((update.future, error))
            return
        self._model.copy_weights(tensors)
        self._version = update.version
        self._slots.forget_prompts()
        if self._config.kv_on_update == "recompute":
            self._recompute_keys_and_values()
        self._log(
            f"version {update.version} loaded in {time.perf_counter() - began:.3f} s, "
            f"{self._slots.num_running} requests running"
        )
        self._results.append((update.future, None))

    def _recompute_keys_and_values(self) -> None:
        slots = self._slots.active()
        known = [self._slots.tokens[s, : self._slots.num_tokens[s] - 1] for s in slots]
        self._model.prefill_each(known, slots)

    def _admit(self) -> None:
        """Gives free slots to waiting requests; one prefill serves all with the same prompt."""
        slots = self._slots
        sharing: dict[bytes, list[int]] = {}
        sources: dict[bytes, int] = {}
        for slot in slots.free():
            pending = self._next_waiting()
            if pending is None:
                break
            if slots.prompts[slot] == pending.prompt:
                sources[pending.prompt] = slot
            slots.occupy(slot, pending)
            sharing.setdefault(pending.prompt, []).append(slot)
        for slot, prompt in enumerate(slots.prompts):
            if prompt in sharing and slot not in sharing[prompt]:
                sources[prompt] = slot
        for prompt, members in sharing.items():
            # The newest token is left to the decode step, which computes its keys and samples.
            known = slots.tokens[members[0], : slots.num_tokens[members[0]] - 1]
            if prompt in sources:
                self._model.copy_prefix(sources[prompt], members, length=len(known))
            else:
                self._model.prefill(known, members)

    def _next_waiting(self) -> Pending | None:
        with self._wake:
            while self._waiting:
                pending = self._waiting.popleft()
                if not pending.future.cancelled():
                    return pending
        return None

    def _decode(self) -> None:
        from asyncrl.engines._slot_model import uniforms

        slots = self._slots
        positions = slots.num_tokens - 1
        tokens, logprobs = self._model.decode(
            slots.tokens[slots.rows, positions],
            positions,
            slots.temperatures,
            uniforms(slots.seeds, slots.num_tokens - slots.num_prompt_tokens),
        )
        if not np.isfinite(logprobs[slots.is_active]).all():
            raise FloatingPointError(
                f"weights of version {self._version} give logits that are not finite; training "
                "diverged: lower trainer.lr or trainer.max_grad_norm"
            )
        slots.append(tokens, logprobs, self._version)
        self._num_generated_tokens += slots.num_running

    def _finish(self) -> None:
        """Resolves the requests whose newest token was their last."""
        slots = self._slots
        newest = slots.tokens[slots.rows, slots.num_tokens - 1]
        stopped = np.isin(newest, self._model.stop_tokens)
        full = slots.num_tokens >= slots.max_tokens
        for slot in np.flatnonzero(slots.is_active & (stopped | full)).tolist():
            pending = slots.owners[slot]
            reason = FinishReason.STOP if stopped[slot] else FinishReason.LENGTH
            completion = slots.completion(slot, reason)
            slots.vacate(slot)
            if pending is not None:
                self._results.append((pending.future, completion))

    def _end(self, cause: BaseException) -> None:
        """Passes `cause` to every call that waits, and to all later ones."""
        with self._wake:
            self._end_cause = cause
            running = [pending for pending in self._slots.owners if pending is not None]
            futures: list[Future[Any]] = [p.future for p in (*running, *self._waiting)]
            futures += [update.future for update in self._updates]
            self._waiting.clear()
            self._updates.clear()
        for slot in self._slots.active():
            self._slots.vacate(slot)
        self._results.append((self._started, cause))
        for future in futures:
            error = RuntimeError(f"the built-in engine ended: {cause}")
            error.__cause__ = cause
            self._results.append((future, error))
        self._deliver()

    def _deliver(self) -> None:
        """Hands the results so far to the event loop."""
        results, self._results = self._results, []
        # A loop that is closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            if results:
                self._loop.call_soon_threadsafe(_resolve, results)

    def _log(self, line: str) -> None:
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("a") as file:
            file.write(line.rstrip() + "\n")


def _resolve(results: list[tuple[Future[Any], Any]]) -> None:
    """Sets results and errors of futures, unless their calls were cancelled. Runs in the loop."""
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
