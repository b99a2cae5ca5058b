"""The own score of a `reasoning-gym` task, for prompts of `asyncrl.datasets.reasoning_gym`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

from asyncrl.config import Config as RunConfig
from asyncrl.interfaces import Prompt

requires = (("reasoning_gym", "pip install 'asyncrl[data]'"),)
_ANSWER = re.compile(r".*answer\s*:\s*(.+)", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


class Config(BaseModel, frozen=True, extra="forbid"):
    """No settings: the prompt says of which task it is."""

    type: Literal["reasoning_gym"] = "reasoning_gym"


def check_fit(config: RunConfig) -> None:
    """ValueError for prompts that are not of a reasoning-gym task."""
    if config.data.type != "reasoning_gym":
        raise ValueError(
            f"reward.type=reasoning_gym scores only answers to data.type=reasoning_gym, not to "
            f"data.type={config.data.type}; change one of them"
        )


def extract_answer(completion: str) -> str:
    """The part of a completion that is scored.

    The rest of the line after the last "Answer:", without a full stop, if there is one; otherwise
    the last number, without thousands separators; otherwise the whole text. White space around
    it does not count.
    """
    if answers := _ANSWER.findall(completion):
        return str(answers[-1]).strip().removesuffix(".")
    if numbers := _NUMBER.findall(completion):
        return str(numbers[-1]).replace(",", "")
    return completion.strip()


class Reward:
    """Implements `asyncrl.interfaces.Reward`.

    A task's scorer may take long, so it runs in a thread.
    """

    def __init__(self, config: Config) -> None:
        del config
        import reasoning_gym

        self._scorer_of: Callable[[str], Callable[[str, Any], float]] = (
            reasoning_gym.get_score_answer_fn
        )
        self._scorers: dict[str, Callable[[str, Any], float]] = {}

    async def close(self) -> None:
        """Nothing was started."""

    async def score(self, completion: str, prompt: Prompt) -> float:
        """The task's `score_answer` of `extract_answer(completion)`."""
        task = prompt.answer["metadata"]["source_dataset"]
        if task not in self._scorers:
            self._scorers[task] = self._scorer_of(task)
        answer = extract_answer(completion)
        return float(await asyncio.to_thread(self._scorers[task], answer, prompt.answer))
