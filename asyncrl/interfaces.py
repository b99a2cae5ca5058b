"""Who may ask what of whom: the verbs between parts. Protocols only, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.trajectory import FinishReason

Messages = Sequence[Mapping[str, str]] | str
"""Chat messages, or plain text for models without a chat template."""


@dataclass(frozen=True)
class Row:
    """One row of a dataset: what is asked, and what the reward checks against."""

    messages: Messages
    answer: Any


@dataclass(frozen=True)
class Prompt:
    """A row of the dataset at its place in the run, ready to be asked."""

    index: int
    """Position in the run's prompt stream."""
    messages: Messages
    answer: Any
    """What the reward checks against."""


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample."""

    request_id: str
    prompt_tokens: NDArray[np.int32]
    """[P]"""
    max_new_tokens: int
    temperature: float
    seed: int
    """Makes the sample reproducible for given weights, whatever else is in the batch."""


@dataclass(frozen=True)
class Completion:
    """What an engine returns for a request. L >= 1."""

    tokens: NDArray[np.int32]
    """[L], the stop token included when there was one."""
    logprobs: NDArray[np.float32]
    """[L] log-probabilities under the distribution that was sampled from (temperature applied)."""
    token_versions: NDArray[np.int32]
    """[L]"""
    finish_reason: FinishReason


class Engine(Protocol):
    """Generates completions and swaps weights in flight. One engine lives in one rollout worker."""

    async def start(self) -> None:
        """Loads the model; the engine then holds policy version 0."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Samples one completion; many calls run at the same time."""

    async def load_weights(self, folder: Path, *, version: int, keep_requests: bool) -> None:
        """Takes the weights in `folder` (safetensors, Hugging Face names) as `version`.

        keep_requests: running requests are paused and go on under the new weights; otherwise they
        finish under the old ones first while new requests wait. Every token is stamped with the
        version that sampled it.
        """

    def stats(self) -> dict[str, float]:
        """num_running, num_waiting, num_generated_tokens (cumulative), busy_s (cumulative)."""

    async def close(self) -> None:
        """Ends the engine and every process it started."""


class Dataset(Protocol):
    """The rows of one split, in the same order every time; the prompt stream shuffles them."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Row:
        """The row with this number, 0 <= number < len."""


class Reward(Protocol):
    """Scores a completion's text."""

    async def score(self, completion: str, prompt: Prompt) -> float:
        """A finite number; the higher the better."""

    async def close(self) -> None:
        """Ends what the reward started."""


class Tracker(Protocol):
    """Receives metrics; one object an optimizer step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step tells the driver."""

    step: int
    metrics: dict[str, float]


class TrainerGroup(Protocol):
    """All trainer ranks, spoken to as one."""

    async def start(self) -> None:
        """Loads the model on every rank."""

    async def step(self) -> StepReport:
        """Takes a batch from the buffer and makes one optimizer step on it."""

    async def export_weights(self, folder: Path) -> None:
        """Writes the current weights (safetensors, Hugging Face names) to `folder`."""


class RolloutWorker(Protocol):
    """One rollout process: an engine, an environment, a reward."""

    async def start(self) -> None: ...

    async def run(self) -> None:
        """Rolls out prompt groups until `stop`; raises when its failure budget is spent."""

    async def load_weights(self, folder: Path, *, version: int) -> None: ...

    async def evaluate(self, prompt_indices: Sequence[int]) -> list[dict[str, Any]]:
        """Completions and rewards of validation prompts under the engine's current version."""

    async def stats(self) -> dict[str, float]:
        """The engine's counters."""

    async def drain_samples(self) -> list[dict[str, Any]]:
        """Sample completions since the last call."""

    async def stop(self) -> None: ...
