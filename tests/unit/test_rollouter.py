from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from asyncrl.config import Algorithm, Config, Overlong
from asyncrl.environments import RolloutFailed
from asyncrl.interfaces import Completion, GenerationRequest, Row
from asyncrl.rollout.advantages import overlong_penalty, with_advantages
from asyncrl.rollout.prompts import PromptStream, encode
from asyncrl.rollout.rollouter import Rollouter
from asyncrl.trainer.model import prepare_model_folder
from asyncrl.trajectory import FinishReason, PromptGroup, Trajectory

Answer = Callable[[GenerationRequest], Awaitable[Completion]]


@dataclass(frozen=True)
class Ticket:
    index: int
    prompt_index: int
    policy_version: int = 0


class Slots:
    """What a rollouter sees of the buffer."""

    def __init__(self) -> None:
        self.groups: list[tuple[Ticket, PromptGroup]] = []
        self.withdrawn: list[tuple[Ticket, str]] = []

    async def put_group_async(self, ticket: Ticket, group: PromptGroup, timeout_s: float) -> None:
        assert timeout_s > 0
        self.groups.append((ticket, group))

    def withdraw(self, ticket: Ticket, cause: str) -> None:
        self.withdrawn.append((ticket, cause))

    def stats(self) -> dict[str, int]:
        return {"num_failed": sum(cause == "failed" for _, cause in self.withdrawn)}


class ScriptedEngine:
    """Answers each request with what a function of the request gives, and remembers them."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.requests: list[GenerationRequest] = []
        self.num_cancelled = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from asyncrl import config_file

    config = config_file.load(config_file.resolve_config_path("quickstart"))
    return prepare_model_folder(config.model, tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


def completion(tokenizer: Any, text: str, versions: tuple[int, int] = (0, 0)) -> Completion:
    tokens = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], dtype=np.int32)
    stamps = np.full(len(tokens), versions[1], dtype=np.int32)
    stamps[0] = versions[0]
    return Completion(tokens, np.full(len(tokens), -0.5, np.float32), stamps, FinishReason.STOP)


def trajectory(num_tokens: int, reward: float) -> Trajectory:
    zeros = np.zeros(num_tokens, dtype=np.int32)
    return Trajectory(zeros, zeros.astype(np.float32), zeros, FinishReason.STOP, reward)


def sample_index(request: GenerationRequest) -> int:
    return int(request.request_id.split("-")[2])


@pytest.fixture
def build(
    tiny_config: Callable[..., Config], model_folder: Path
) -> Callable[..., tuple[Rollouter, ScriptedEngine, Slots]]:
    def build(answer: Answer, *overrides: str) -> tuple[Rollouter, ScriptedEngine, Slots]:
        engine, slots = ScriptedEngine(answer), Slots()
        config = tiny_config(*overrides)
        rollouter = Rollouter(config, engine=engine, buffer=slots, model_folder=model_folder)  # type: ignore[arg-type]
        return rollouter, engine, slots

    return build


async def test_group_has_rewards_of_its_texts_and_advantages_centred_on_it(
    build: Any, tokenizer: Any
) -> None:
    async def answer(request: GenerationRequest) -> Completion:
        word = tokenizer.decode(request.prompt_tokens.tolist()).removesuffix(">")
        right = sample_index(request) == 0
        return completion(tokenizer, word[::-1] if right else "", versions=(3, 4))

    rollouter, _, slots = build(answer)
    ticket = Ticket(index=9, prompt_index=5)
    await rollouter.run_group(ticket)
    [(put, group)] = slots.groups
    assert (put, group.prompt_index) == (ticket, 5)
    assert [t.reward for t in group.trajectories] == [1.0, 0.0, 0.0, 0.0]
    # (r - 1/4) / (1/2 + 1e-6): the unbiased deviation of 1, 0, 0, 0 is 1/2.
    np.testing.assert_allclose(
        [t.advantage for t in group.trajectories], [1.5, -0.5, -0.5, -0.5], rtol=1e-5
    )
    assert group.trajectories[0].token_versions.tolist() == [3, 4, 4, 4]
    [sample] = rollouter.drain_samples()
    assert sample["prompt"] == sample["completion"][::-1] + ">"
    assert (sample["reward"], sample["first_policy_version"], sample["policy_version"]) == (1, 3, 4)
    assert rollouter.drain_samples() == []


async def test_seeds_differ_between_samples_and_repeat_between_runs(
    build: Any, tokenizer: Any
) -> None:
    async def answer(_: GenerationRequest) -> Completion:
        return completion(tokenizer, "a")

    async def seeds(*overrides: str) -> list[int]:
        rollouter, engine, _ = build(answer, *overrides)
        for index in (0, 1):
            await rollouter.rollout_group(index)
        return [request.seed for request in engine.requests]

    first = await seeds()
    assert len(set(first)) == 8
    assert await seeds() == first
    assert not set(await seeds("run.seed=1")) & set(first)


async def test_one_failed_sample_withdraws_the_group_and_cancels_the_others(build: Any) -> None:
    async def answer(request: GenerationRequest) -> Completion:
        if sample_index(request) == 2:
            raise ConnectionError("engine is gone")
        return await asyncio.Future()

    rollouter, engine, slots = build(answer, "rollout.max_failures=1")
    await rollouter.run_group(Ticket(0, 0))
    assert slots.groups == []
    assert slots.withdrawn == [(Ticket(0, 0), "failed")]
    assert engine.num_cancelled == 3
    with pytest.raises(
        RolloutFailed, match=r"2 prompt groups failed.*max_failures=1.*2 x.*engine is gone"
    ):
        await rollouter.run_group(Ticket(1, 1))
    assert len(slots.withdrawn) == 2


async def test_engine_that_never_answers_fails_by_its_deadline(build: Any) -> None:
    async def answer(_: GenerationRequest) -> Completion:
        return await asyncio.Future()

    rollouter, _, _ = build(answer, "deadlines.generate_s=0.01", "deadlines.publish_s=0.01")
    with pytest.raises(RolloutFailed, match=r"0\.02 s for the engine \(deadlines\.generate_s\)"):
        await rollouter.rollout_group(0)


async def test_completion_of_unequal_arrays_fails_the_group(build: Any, tokenizer: Any) -> None:
    async def answer(_: GenerationRequest) -> Completion:
        whole = completion(tokenizer, "abcd")
        return dataclasses.replace(whole, logprobs=whole.logprobs[:-1])

    rollouter, _, _ = build(answer)
    with pytest.raises(RolloutFailed, match="5 tokens, 4 log-probs and 5 versions"):
        await rollouter.rollout_group(0)


async def test_validation_asks_each_held_out_prompt_once(build: Any, tokenizer: Any) -> None:
    async def answer(request: GenerationRequest) -> Completion:
        word = tokenizer.decode(request.prompt_tokens.tolist()).removesuffix(">")
        return completion(tokenizer, word[::-1], versions=(7, 7))

    rollouter, engine, slots = build(answer, "validation.num_prompts=6")
    answers = await rollouter.evaluate(range(6))
    assert [a["prompt_index"] for a in answers] == list(range(6))
    assert [a["reward"] for a in answers] == [1.0] * 6
    assert {a["policy_version"] for a in answers} == {7}
    assert len(engine.requests) == 6
    assert slots.groups == []


class Words:
    """A dataset of plain text in a fixed order."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def __len__(self) -> int:
        return len(self._words)

    def row(self, number: int) -> Row:
        return Row(messages=self._words[number], answer=None)


def stream(
    words: Words, tokenizer: Any, *, alphabet: str | None = None, seed: int = 0
) -> PromptStream:
    return PromptStream(
        words, tokenizer=tokenizer, max_prompt_tokens=4, seed=seed, alphabet=alphabet
    )


def letters(prompts: PromptStream, indices: Iterable[int]) -> str:
    """The prompts at these indices, when each is one letter."""
    return "".join(str(prompts.draw(index)[0].messages) for index in indices)


def test_each_epoch_has_every_row_once_in_another_order(tokenizer: Any) -> None:
    prompts = stream(Words(*"abcdefgh"), tokenizer)
    first, second = letters(prompts, range(8)), letters(prompts, range(8, 16))
    assert sorted(first) == sorted(second) == list("abcdefgh")
    assert len({first, second, "abcdefgh"}) == 3


def test_prompt_at_an_index_does_not_depend_on_what_was_drawn_before(tokenizer: Any) -> None:
    words = Words(*"abcdefgh")
    drawn = letters(stream(words, tokenizer), range(28))
    assert letters(stream(words, tokenizer), (27, 3, 12)) == drawn[27] + drawn[3] + drawn[12]
    assert letters(stream(words, tokenizer, seed=1), range(8)) != drawn[:8]


def test_prompt_that_is_too_long_is_left_out_by_name(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        prompts = stream(Words("ab>", "abcde>", "cd>"), tokenizer)
    assert "1 of 3 prompts" in caplog.text
    assert "row 1 (6 tokens)" in caplog.text
    assert sorted(str(prompts.draw(i)[0].messages) for i in range(4)) == ["ab>"] * 2 + ["cd>"] * 2
    prompt, tokens = prompts.draw(3)
    assert prompt.index == 3
    assert tokens.tolist() == tokenizer(prompt.messages)["input_ids"]


def test_stream_without_a_short_prompt_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"none is left: raise rollout\.max_prompt_tokens"):
        stream(Words("abcde>"), tokenizer)


def test_letter_outside_the_models_alphabet_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"characters 'z' that model\.random\.alphabet='abc>'"):
        stream(Words("ab>", "az>"), tokenizer, alphabet="abc>")


def test_chat_messages_without_a_template_are_an_error(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        encode([{"role": "user", "content": "ab"}], tokenizer)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(4000, 0.0), (4096, 0.0), (6144, -0.5), (8192, -1.0)]
)
def test_overlong_penalty_is_that_of_dapo(num_tokens: int, penalty: float) -> None:
    overlong = Overlong(buffer_tokens=4096, penalty=1.0)
    assert overlong_penalty(num_tokens, overlong=overlong, max_response_tokens=8192) == penalty


def test_overlong_penalty_moves_advantages_and_leaves_rewards() -> None:
    algorithm = Algorithm.model_validate(
        {
            "group_size": 2,
            "advantage": {"estimator": "dr_grpo"},
            "overlong": {"buffer_tokens": 4, "penalty": 1.0},
        }
    )
    pair = with_advantages(
        [trajectory(4, 1.0), trajectory(8, 1.0)], algorithm=algorithm, max_response_tokens=8
    )
    assert [t.reward for t in pair] == [1.0, 1.0]
    assert [t.advantage for t in pair] == [0.5, -0.5]
