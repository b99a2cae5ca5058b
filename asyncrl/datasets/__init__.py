"""Prompts of a run: one module a kind of data, and what all of them share.

A plug-in module offers `Config`, `requires` if it needs packages, `check(config)` for the preflight
and `Dataset(config, *, seed, split)`, which implements `asyncrl.interfaces.Dataset`: rows in a
fixed order, since `asyncrl.rollout.prompts` shuffles. `seed` is for data that is generated. A row
belongs to one split by the hash of its own text, so that a row held out in one run is not trained
in another.
"""

from __future__ import annotations

import hashlib
from typing import Literal

Split = Literal["train", "validation"]


def stable_hash(*parts: object) -> int:
    """A 64-bit hash of the parts' text, the same in every process and on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_in_split(text: str, *, split: Split, validation_share: float) -> bool:
    """Whether a row with this text is in the split; `validation_share` of all are held out."""
    is_held_out = stable_hash("split", text) < validation_share * 2**64
    return is_held_out == (split == "validation")
