"""Any task of the `reasoning-gym` package, generated offline, as chat prompts.

Small tasks repeat their questions, so rows are unique by question before they are split.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from pydantic import BaseModel, Field

from asyncrl.datasets import Split, is_in_split
from asyncrl.interfaces import Row

requires = (("reasoning_gym", "pip install 'asyncrl[data]'"),)
_log = logging.getLogger(__name__)


class Config(BaseModel, frozen=True, extra="forbid"):
    """A task, its settings, and how the model is told to answer."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = "chain_sum"
    """Name of a reasoning-gym task."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings, such as min_digits; what is left out is the task's default."""
    num_rows: int = Field(default=2048, ge=2)
    """Questions to generate for both splits together; repeated ones are dropped."""
    instruction: str = "Answer with the number only."
    """Follows each question, after an empty line; empty adds nothing."""
    validation_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the questions that is held out, chosen by the hash of the question."""


def check(config: Config) -> None:
    """ValueError when the task or one of its settings is not legal."""
    _generate(config, seed=0, num_rows=1)


def _generate(config: Config, *, seed: int, num_rows: int) -> list[dict[str, Any]]:
    import reasoning_gym

    # The task's own generators take seeds of 31 bits.
    options = {**config.settings, "seed": seed % 2**31, "size": num_rows}
    try:
        entries = reasoning_gym.create_dataset(config.task, **options)
        return [entries[i] for i in range(num_rows)]
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(
            f"data.task={config.task!r} with data.settings={config.settings}: {error or 'refused'}"
            "; legal are the tasks and settings of reasoning-gym"
        ) from error


class Dataset:
    """Implements `asyncrl.interfaces.Dataset`; an answer is the task's entry, for its scorer."""

    def __init__(self, config: Config, *, seed: int, split: Split) -> None:
        entries = _generate(config, seed=seed, num_rows=config.num_rows)
        unique = {entry["question"]: entry for entry in entries}
        self._config = config
        self._entries = [
            entry
            for question, entry in unique.items()
            if is_in_split(question, split=split, validation_share=config.validation_share)
        ]
        if not self._entries:
            raise ValueError(
                f"data.task={config.task!r} has {len(unique)} different questions among "
                f"data.num_rows={config.num_rows}, none of them in the {split} split; raise "
                "data.num_rows or change data.validation_share"
            )
        _log.info(
            "%s: %d different questions of %d generated, %d for %s",
            config.task, len(unique), len(entries), len(self._entries), split,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._entries)

    def row(self, number: int) -> Row:
        """The question as one user message, and the task's entry."""
        entry = self._entries[number]
        parts = [entry["question"], self._config.instruction]
        content = "\n\n".join(part for part in parts if part)
        return Row(messages=[{"role": "user", "content": content}], answer=entry)
