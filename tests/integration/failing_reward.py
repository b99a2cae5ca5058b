"""A reward that never has an answer, for tests of the failure budget."""

from __future__ import annotations

from pydantic import BaseModel

from asyncrl.interfaces import Prompt


class Config(BaseModel, frozen=True, extra="forbid"):
    type: str


class Reward:
    def __init__(self, config: Config) -> None:
        del config

    async def score(self, completion: str, prompt: Prompt) -> float:
        raise LookupError(f"no score for {completion!r} to prompt {prompt.index}")

    async def close(self) -> None:
        """Nothing was started."""
