"""One question, one answer, one score."""

from __future__ import annotations

import math
from collections.abc import Awaitable
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from asyncrl.config import Rollout
from asyncrl.deadline import DeadlineExceeded, within
from asyncrl.environments import RolloutFailed, ScoredCompletion
from asyncrl.interfaces import Completion, Engine, GenerationRequest, Prompt, Reward
from asyncrl.trajectory import Trajectory

T = TypeVar("T")


class Config(BaseModel, frozen=True, extra="forbid"):
    """No settings."""

    type: Literal["single_turn"] = "single_turn"


class Environment:
    """Asks the engine once and scores what it says. Without state: many rollouts run at a time."""

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine,
        tokenizer: Any,
        reward: Reward,
        rollout: Rollout,
        generation_s: float,
        reward_s: float,
    ) -> None:
        del config
        self._engine = engine
        self._tokenizer = tokenizer
        self._reward = reward
        self._rollout = rollout
        self._generation_s = generation_s
        self._reward_s = reward_s

    async def rollout(
        self, prompt: Prompt, prompt_tokens: NDArray[np.int32], *, request_id: str, seed: int
    ) -> ScoredCompletion:
        """A completion of `prompt_tokens` ([P]) and its reward.

        consumes: a prompt; produces: a scored completion; waits for: the engine, then the reward;
        unblocked by: deadlines.generate_s and deadlines.reward_s, then RolloutFailed.
        """
        request = GenerationRequest(
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            max_new_tokens=self._rollout.max_response_tokens,
            temperature=self._rollout.temperature,
            seed=seed,
        )
        completion = await _within(
            self._engine.generate(request), self._generation_s, "the engine", "generate_s"
        )
        _check_lengths(completion)
        text = self._tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True)
        reward = await _within(
            self._reward.score(text, prompt), self._reward_s, "the reward", "reward_s"
        )
        if not math.isfinite(reward):
            raise RolloutFailed(f"the reward returned {reward}; it must return a finite number")
        trajectory = Trajectory(
            completion_tokens=completion.tokens,
            behavior_logprobs=completion.logprobs,
            token_versions=completion.token_versions,
            finish_reason=completion.finish_reason,
            reward=reward,
        )
        return ScoredCompletion(trajectory, text)


async def _within(work: Awaitable[T], deadline_s: float, who: str, setting: str) -> T:
    """The result of `work`; RolloutFailed when it takes too long or fails."""
    try:
        return await within(work, deadline_s, f"{who} (deadlines.{setting})")
    except DeadlineExceeded as error:
        raise RolloutFailed(str(error)) from error
    except Exception as error:
        # A plug-in may raise anything; the failure budget decides whether the run goes on.
        raise RolloutFailed(f"{who} failed: {type(error).__name__}: {error}") from error


def _check_lengths(completion: Completion) -> None:
    lengths = [len(x) for x in (completion.tokens, completion.logprobs, completion.token_versions)]
    if lengths[0] < 1 or len(set(lengths)) != 1:
        raise RolloutFailed(
            "the engine returned {} tokens, {} log-probs and {} versions; they must be equally "
            "many, and at least one".format(*lengths)
        )
