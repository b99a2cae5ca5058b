"""Which request of the built-in engine runs in which slot, and what it has produced so far.

Arrays over slots, so that the bookkeeping of a decode step is a handful of numpy calls. Used by the
engine's thread alone; numpy only.
"""

from __future__ import annotations

from asyncio import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.interfaces import Completion, GenerationRequest
from asyncrl.trajectory import FinishReason

ROW_MULTIPLE = 16
"""CPU kernels may treat the last rows of other batch sizes differently (vector tails, threads)."""


@dataclass(eq=False)
class Pending:
    """A request and the future that `generate` awaits."""

    request: GenerationRequest
    future: Future[Completion]

    @property
    def prompt(self) -> bytes:
        """The prompt's tokens as a dictionary key."""
        return self.request.prompt_tokens.tobytes()


class Slots:
    """The running requests, as arrays over rows. M = max_model_len.

    S = num_slots rounded up to ROW_MULTIPLE; the rows beyond num_slots always idle.
    """

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self._num_slots = num_slots
        num_rows = -(-num_slots // ROW_MULTIPLE) * ROW_MULTIPLE
        self.owners: list[Pending | None] = [None] * num_rows
        self.rows = np.arange(num_rows)
        self.is_active = np.zeros(num_rows, np.bool_)
        self.tokens = np.zeros((num_rows, max_model_len), np.int64)
        self.logprobs = np.zeros((num_rows, max_model_len), np.float32)
        self.versions = np.zeros((num_rows, max_model_len), np.int32)
        self.prompts = [b""] * num_rows
        """[S] the prompt that a slot's keys and values begin with, computed by a prefill under the
        present weights; "" where there is none. Outlives the request, so that others can copy."""
        self.num_prompt_tokens = np.full(num_rows, max_model_len, np.int64)
        self.num_tokens = np.full(num_rows, max_model_len, np.int64)
        """[S] prompt and completion so far. An idle slot pretends to be full: its row of the decode
        step then writes to the one position that no request ever reads."""
        self.max_tokens = np.full(num_rows, max_model_len, np.int64)
        self.temperatures = np.ones(num_rows, np.float64)
        self.seeds = np.zeros(num_rows, np.uint64)

    @property
    def num_running(self) -> int:
        return int(np.count_nonzero(self.is_active))

    def active(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self.is_active)]

    def free(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(~self.is_active[: self._num_slots])]

    def occupy(self, slot: int, pending: Pending) -> None:
        request = pending.request
        length = len(request.prompt_tokens)
        self.owners[slot] = pending
        self.is_active[slot] = True
        self.tokens[slot, :length] = request.prompt_tokens
        self.prompts[slot] = pending.prompt
        self.num_prompt_tokens[slot] = self.num_tokens[slot] = length
        self.max_tokens[slot] = length + request.max_new_tokens
        self.temperatures[slot] = request.temperature
        self.seeds[slot] = request.seed % 2**64

    def vacate(self, slot: int) -> None:
        self.owners[slot] = None
        self.is_active[slot] = False
        self.num_tokens[slot] = self.num_prompt_tokens[slot] = self.tokens.shape[1]
        self.temperatures[slot] = 1.0

    def forget_prompts(self) -> None:
        """New weights: no slot's keys and values may serve another request any more."""
        self.prompts = [b""] * len(self.prompts)

    def append(
        self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
    ) -> None:
        """Takes one sampled token ([S]) for every active slot."""
        slots = np.flatnonzero(self.is_active)
        at = self.num_tokens[slots]
        self.tokens[slots, at] = tokens[slots]
        self.logprobs[slots, at] = logprobs[slots]
        self.versions[slots, at] = version
        self.num_tokens[slots] += 1

    def completion(self, slot: int, finish_reason: FinishReason) -> Completion:
        span = slice(int(self.num_prompt_tokens[slot]), int(self.num_tokens[slot]))
        return Completion(
            tokens=self.tokens[slot, span].astype(np.int32),
            logprobs=self.logprobs[slot, span].copy(),
            token_versions=self.versions[slot, span].copy(),
            finish_reason=finish_reason,
        )
