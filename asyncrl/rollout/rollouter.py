"""Rolls out one prompt group for each slot of the buffer; many groups at the same time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl import plugins
from asyncrl.config import Config
from asyncrl.datasets import Split, stable_hash
from asyncrl.environments import RolloutFailed, ScoredCompletion
from asyncrl.interfaces import Engine, Prompt, Reward
from asyncrl.rollout.advantages import with_advantages
from asyncrl.rollout.prompts import PromptStream
from asyncrl.trajectory import PromptGroup

_log = logging.getLogger(__name__)
_MAX_SAMPLES = 64


class Ticket(Protocol):
    """A slot of the buffer that waits for its prompt group (see `asyncrl.buffer`)."""

    @property
    def prompt_index(self) -> int: ...


class Buffer(Protocol):
    """What a rollouter asks of the trajectory buffer."""

    async def put_group_async(self, ticket: Any, group: PromptGroup, timeout_s: float) -> None: ...

    def withdraw(self, ticket: Any, cause: str) -> None: ...

    def stats(self) -> dict[str, int]: ...


class Rollouter:
    """Turns tickets into prompt groups, with a budget for those that fail."""

    def __init__(
        self, config: Config, *, engine: Engine, buffer: Buffer, model_folder: Path
    ) -> None:
        """Reads the data and the tokenizer in `model_folder`.

        ValueError when the data cannot be used; the message names the setting.
        """
        from transformers import AutoTokenizer

        self._config = config
        self._buffer = buffer
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        rewards = plugins.load("rewards", config.reward.type)
        self._reward: Reward = rewards.Reward(config.reward.settings("rewards"))
        environments = plugins.load("environments", config.environment.type)
        self._environment = environments.Environment(
            config.environment.settings("environments"),
            engine=engine,
            tokenizer=tokenizer,
            reward=self._reward,
            rollout=config.rollout,
            generation_s=config.generation_s,
            reward_s=config.deadlines.reward_s,
        )
        self._streams = {
            split: _stream(config, tokenizer, split=split) for split in _splits(config)
        }
        self._request_numbers = itertools.count()
        self._failures: Counter[str] = Counter()
        self._samples: deque[dict[str, Any]] = deque(maxlen=_MAX_SAMPLES)

    async def run_group(self, ticket: Ticket) -> None:
        """Fills one slot, or gives it back.

        consumes: a ticket; produces: a prompt group in the buffer; waits for: the engine and the
        reward; unblocked by: their deadlines. Raises RolloutFailed once more groups have failed
        than rollout.max_failures.
        """
        try:
            group = await self.rollout_group(ticket.prompt_index)
        except RolloutFailed as error:
            self._buffer.withdraw(ticket, "failed")
            self._count_failure(ticket.prompt_index, error)
        else:
            await self._buffer.put_group_async(ticket, group, self._config.slot_s)

    async def rollout_group(self, prompt_index: int) -> PromptGroup:
        """The prompt's n completions, sampled at the same time, with rewards and advantages.

        One failed completion fails the group: a group of fewer would have another baseline.
        """
        algorithm = self._config.algorithm
        prompt, tokens = self._streams["train"].draw(prompt_index)
        completions = await _all(
            self._sample(prompt, tokens, split="train", sample_index=i)
            for i in range(algorithm.group_size)
        )
        self._samples.append(_describe(prompt, completions[0]))
        trajectories = with_advantages(
            [completion.trajectory for completion in completions],
            algorithm=algorithm,
            max_response_tokens=self._config.rollout.max_response_tokens,
        )
        return PromptGroup(prompt_index, tokens, trajectories)

    async def evaluate(self, prompt_indices: Sequence[int]) -> list[dict[str, Any]]:
        """One completion of each of these held-out prompts: prompt, completion, reward, version.

        Raises RolloutFailed when one of them fails: a mean over the rest would mislead.
        """
        prompts = [self._streams["validation"].draw(index) for index in prompt_indices]
        completions = await _all(
            self._sample(prompt, tokens, split="validation", sample_index=0)
            for prompt, tokens in prompts
        )
        return [
            _describe(prompt, completion)
            for (prompt, _), completion in zip(prompts, completions, strict=True)
        ]

    async def close(self) -> None:
        """Ends what the reward started."""
        await self._reward.close()

    def drain_samples(self) -> list[dict[str, Any]]:
        """One completion of each group since the last call; the last 64 when there were more."""
        samples = list(self._samples)
        self._samples.clear()
        return samples

    def _sample(
        self, prompt: Prompt, tokens: Any, *, split: Split, sample_index: int
    ) -> Coroutine[Any, Any, ScoredCompletion]:
        seed = stable_hash(self._config.run.seed, split, prompt.index, sample_index)
        rollout: Coroutine[Any, Any, ScoredCompletion] = self._environment.rollout(
            prompt,
            tokens,
            # The number keeps a prompt that is admitted a second time apart from the first.
            request_id=f"{split}-{prompt.index}-{sample_index}-{next(self._request_numbers)}",
            # Engines hand seeds to generators that take 32 bits.
            seed=seed % 2**32,
        )
        return rollout

    def _count_failure(self, prompt_index: int, error: RolloutFailed) -> None:
        self._failures[str(error)] += 1
        budget = self._config.rollout.max_failures
        num_failures = self._buffer.stats()["num_failed"]  # of all workers
        _log.warning("prompt %d failed (%d of %d): %s", prompt_index, num_failures, budget, error)
        if num_failures > budget:
            reasons = "; ".join(f"{n} x {why}" for why, n in self._failures.most_common(3))
            raise RolloutFailed(
                f"{num_failures} prompt groups failed and rollout.max_failures={budget} are "
                f"allowed: {reasons}"
            ) from error


def _splits(config: Config) -> list[Split]:
    return ["train", "validation"] if config.validation.num_prompts else ["train"]


def _stream(config: Config, tokenizer: Any, *, split: Split) -> PromptStream:
    module = plugins.load("datasets", config.data.type)
    seed = config.run.seed
    return PromptStream(
        module.Dataset(config.data.settings("datasets"), seed=seed, split=split),
        tokenizer=tokenizer,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        seed=seed,
        alphabet=config.model.random.alphabet if config.model.random else None,
    )


async def _all(work: Any) -> list[ScoredCompletion]:
    """All results; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in work]
    except* RolloutFailed as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _describe(prompt: Prompt, completion: ScoredCompletion) -> dict[str, Any]:
    trajectory = completion.trajectory
    return {
        "prompt_index": prompt.index,
        "prompt": prompt.messages
        if isinstance(prompt.messages, str)
        else [dict(message) for message in prompt.messages],
        "completion": completion.text,
        "reward": trajectory.reward,
        "policy_version": int(trajectory.token_versions[-1]),
        "first_policy_version": int(trajectory.token_versions[0]),
        "num_tokens": len(trajectory.completion_tokens),
    }
