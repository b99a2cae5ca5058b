"""A procedural task that a tiny model learns from nothing: write the letters backwards."""

from __future__ import annotations

from itertools import product
from typing import Literal

from pydantic import BaseModel, Field, field_validator

from asyncrl.config import Config as RunConfig
from asyncrl.datasets import Split, is_in_split
from asyncrl.interfaces import Row

_MAX_ROWS = 1_000_000


class Config(BaseModel, frozen=True, extra="forbid"):
    """Every string of `length` letters is a row: "abcd>" asks for "dcba"."""

    type: Literal["reverse"] = "reverse"
    alphabet: str = "abcdefgh"
    length: int = Field(default=4, ge=2)
    validation_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the rows that is held out, chosen by the hash of the row."""

    @field_validator("alphabet")
    @classmethod
    def _letters_differ(cls, value: str) -> str:
        if len(set(value)) != len(value) or len(value) < 2 or ">" in value:
            raise ValueError("give at least two letters, each once, and not '>'")
        return value


def check(config: Config) -> None:
    """ValueError for an alphabet and length with too many rows to list or too few to split."""
    num_rows = len(config.alphabet) ** config.length
    if num_rows > _MAX_ROWS:
        raise ValueError(
            f"data.alphabet of {len(config.alphabet)} letters and data.length={config.length} make "
            f"{num_rows} rows; at most {_MAX_ROWS} are listed: shorten data.length"
        )
    for split in ("train", "validation"):
        if not _words(config, split=split):
            raise ValueError(
                f"data.alphabet={config.alphabet!r}, data.length={config.length} and "
                f"data.validation_share={config.validation_share} leave no {split} row; raise "
                "data.length or change data.validation_share"
            )


def check_fit(config: RunConfig) -> None:
    """ValueError for words that a random model cannot read, or the rollout's lengths cut off."""
    settings, random = config.data.settings("datasets"), config.model.random
    if random is None:  # a tokenizer that is not a letter a token
        return
    needed = [letter for letter in f"{settings.alphabet}>" if letter not in random.alphabet]
    if needed:
        raise ValueError(
            f"data.alphabet={settings.alphabet!r} and the '>' that ends a prompt: "
            f"model.random.alphabet={random.alphabet!r} lacks {''.join(needed)!r}; add that to "
            "model.random.alphabet"
        )
    rollout = config.rollout
    for key, length, limit in (
        ("max_prompt_tokens", settings.length + 1, rollout.max_prompt_tokens),
        ("max_response_tokens", settings.length, rollout.max_response_tokens),
    ):
        if length > limit:
            raise ValueError(
                f"data.length={settings.length} needs {length} tokens, rollout.{key}={limit}; set "
                f"rollout.{key} >= {length} or shorten data.length"
            )


def _words(config: Config, *, split: Split) -> list[str]:
    words = ("".join(letters) for letters in product(config.alphabet, repeat=config.length))
    return [
        w for w in words if is_in_split(w, split=split, validation_share=config.validation_share)
    ]


class Dataset:
    """Implements `asyncrl.interfaces.Dataset`; prompts are plain text, answers are strings."""

    def __init__(self, config: Config, *, seed: int, split: Split) -> None:
        del seed  # the words are all there are, for every run
        check(config)
        self._words = _words(config, split=split)

    def __len__(self) -> int:
        return len(self._words)

    def row(self, number: int) -> Row:
        """The word, and the word backwards as its answer."""
        word = self._words[number]
        return Row(messages=f"{word}>", answer=word[::-1])
