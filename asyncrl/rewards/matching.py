"""Share of right letters: dense enough that a model from random weights can begin to learn."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from asyncrl.interfaces import Prompt


class Config(BaseModel, frozen=True, extra="forbid"):
    """No settings."""

    type: Literal["matching"] = "matching"


def share_of_matches(completion: str, answer: str) -> float:
    """Positions with the same letter, divided by the length of the longer string, in [0, 1].

    White space around the completion does not count. A missing letter and a letter too many both
    lower the share; two empty strings give 1.
    """
    completion = completion.strip()
    longer = max(len(completion), len(answer))
    num_matches = sum(a == b for a, b in zip(completion, answer, strict=False))
    return num_matches / longer if longer else 1.0


class Reward:
    """Implements `asyncrl.interfaces.Reward` for string answers."""

    def __init__(self, config: Config) -> None:
        del config

    async def close(self) -> None:
        """Nothing was started."""

    async def score(self, completion: str, prompt: Prompt) -> float:
        """`share_of_matches` of the completion and the prompt's answer."""
        return share_of_matches(completion, prompt.answer)
