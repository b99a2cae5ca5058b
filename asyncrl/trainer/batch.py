"""A rank's share of a step as tensors: its micro-batches seen as one packed batch, and back.

Not here: which trajectory goes where (`batcher`), what is done with them (`step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from asyncrl.trainer.batcher import MicroBatch


@dataclass(frozen=True)
class Batch:
    """What this rank trains on in one step: T tokens of S trajectories, cut into micro-batches."""

    micro_batches: Sequence[MicroBatch]
    num_groups: int
    """Prompt groups of the whole step, over all ranks."""
    trainer_version: int
    """Policy version of the trainer when the batch was taken."""
    device: torch.device

    @cached_property
    def behavior_logprobs(self) -> Tensor:
        """[T] float32."""
        return self._packed([m.behavior_logprobs for m in self.micro_batches])

    @cached_property
    def staleness(self) -> Tensor:
        """[T] int64, trainer version - token version."""
        versions = self._packed([m.token_versions for m in self.micro_batches])
        return self.trainer_version - versions.long()

    @cached_property
    def offsets(self) -> Tensor:
        """[S + 1] int64."""
        lengths = [np.diff(m.offsets) for m in self.micro_batches]
        return self._packed([np.concatenate([[0], np.cumsum(np.concatenate(lengths))])])

    @cached_property
    def group_ids(self) -> Tensor:
        """[S] int64."""
        return self._packed([m.group_ids for m in self.micro_batches])

    def split(self, values: Tensor) -> Sequence[Tensor]:
        """[T] values of the batch, by micro-batch."""
        return torch.split(values, [len(m.tokens) for m in self.micro_batches])

    def split_optional(self, values: Tensor | None) -> Sequence[Tensor | None]:
        """As `split`; without values, None for each micro-batch."""
        return [None] * len(self.micro_batches) if values is None else self.split(values)

    def num_trained_tokens(self, loss_mask: Tensor) -> Tensor:
        """[S] float64, of each trajectory; loss_mask: [T] bool, True = trained."""
        trained = torch.zeros(len(loss_mask) + 1, dtype=torch.float64, device=self.device)
        trained[1:] = loss_mask.cumsum(0)
        return trained[self.offsets].diff()

    def _packed(self, arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(self.device)
