"""Keys and values of a fixed set of decode slots, as a cache that transformers models write to.

Not a paged cache: every slot owns room for a whole sequence, so that the shapes of a decode step,
and with them the kernels that run, never depend on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


@dataclass
class _Target:
    """Where the next forward pass writes; shared by all layers."""

    slots: torch.Tensor
    """[n] int64"""
    positions: torch.Tensor | None = None
    """[n] int64: one new token a slot; None: whole sequences that start at position 0."""


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values, [num_slots, kv_heads, max_length, head_dim] each."""

    def __init__(self, target: _Target, *, num_slots: int, max_length: int) -> None:
        super().__init__()
        self._target = target
        self._num_slots = num_slots
        self._max_length = max_length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates room for every slot, with the heads and dtype of the first states seen."""
        self.device = key_states.device
        self.keys = self._room(key_states)
        self.values = self._room(value_states)
        self.is_initialized = True

    def _room(self, states: torch.Tensor) -> torch.Tensor:
        _, num_heads, _, head_dim = states.shape
        return states.new_zeros(self._num_slots, num_heads, self._max_length, head_dim)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [B, kv_heads, Q, head_dim] states; returns the keys and values to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots, positions = self._target.slots, self._target.positions
        if positions is None:
            length = key_states.shape[2]
            self.keys[slots, :, :length] = key_states
            self.values[slots, :, :length] = value_states
            return key_states, value_states
        self.keys[slots, :, positions] = key_states[:, :, 0]
        self.values[slots, :, positions] = value_states[:, :, 0]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """0: positions and masks are always given, never derived from the cache."""
        return 0


class SlotCache(Cache):  # type: ignore[misc]
    """A cache of `num_slots` sequences; aim it before each forward pass."""

    def __init__(
        self, num_layers: int, *, num_slots: int, max_length: int, device: torch.device
    ) -> None:
        self._all_slots = torch.arange(num_slots, device=device)
        self._target = _Target(self._all_slots)
        super().__init__(
            layers=[
                _SlotLayer(self._target, num_slots=num_slots, max_length=max_length)
                for _ in range(num_layers)
            ]
        )

    def aim_at_next(self, positions: torch.Tensor) -> None:
        """The pass carries one token of every slot, at `positions` ([num_slots] int64)."""
        self._target.slots = self._all_slots
        self._target.positions = positions

    def aim_at_start(self, slots: torch.Tensor) -> None:
        """The pass carries sequences from position 0: one for each of `slots` ([n] int64), or one
        that all of them share."""
        self._target.slots = slots
        self._target.positions = None

    def copy_prefix(self, source: int, slots: torch.Tensor, *, length: int) -> None:
        """Copies positions 0 .. length - 1 of `source` to each of `slots` ([n] int64)."""
        for layer in self.layers:
            for states in (layer.keys, layer.values):
                # Cloned: `source` may itself be among the slots.
                states[slots, :, :length] = states[source, :, :length].clone()
