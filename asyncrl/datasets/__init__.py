"""Prompts of a run: one module a kind of data, and what all of them share.

A plug-in module offers `Config`, `requires` if it needs packages, `check(config)` for the preflight
and `Dataset(config, *, seed, split)`, which implements `asyncrl.interfaces.Dataset`. A row belongs
to one split by the hash of its own text, so that the held-out rows are the same in every run and
never among the training rows.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np

Split = Literal["train", "validation"]


def stable_hash(*parts: object) -> int:
    """A 64-bit hash of the parts' text, the same in every process and on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_in_split(text: str, *, split: Split, validation_share: float) -> bool:
    """Whether a row with this text is in the split; `validation_share` of all are held out."""
    is_held_out = stable_hash("split", text) < validation_share * 2**64
    return is_held_out == (split == "validation")


class Shuffle:
    """The order of a stream: index -> (epoch, position) -> row, with a new order every epoch."""

    def __init__(self, num_rows: int, *, seed: int) -> None:
        self._num_rows = num_rows
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def row(self, index: int) -> int:
        """The row at a position of the stream; a pure function of index, seed and num_rows."""
        epoch, position = divmod(index, self._num_rows)
        if epoch != self._epoch:
            generator = np.random.default_rng(stable_hash("shuffle", self._seed, epoch))
            self._order = generator.permutation(self._num_rows).tolist()
            self._epoch = epoch
        return self._order[position]
