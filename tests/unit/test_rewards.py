from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from asyncrl.interfaces import Prompt
from asyncrl.rewards import matching, math_verify, reasoning_gym


def asks(answer: Any) -> Prompt:
    return Prompt(index=0, messages="?", answer=answer)


@pytest.mark.parametrize(
    ("completion", "share"),
    [
        ("dcba", 1.0),
        ("dcbb", 0.75),
        ("d", 0.25),
        ("", 0.0),
        ("cba", 0.0),
        ("dcbaa", 0.8),
        ("dcbadcba", 0.5),
        (" dcba\n", 1.0),
    ],
)
def test_share_of_matches_loses_by_wrong_missing_and_surplus_letters(
    completion: str, share: float
) -> None:
    assert matching.share_of_matches(completion, "dcba") == share


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7", "7"),
        ("4 + 3 is 7.", "7"),
        ("Answer: 7\nbecause 3 and 4", "7"),
        ("answer:5 no, Answer: 7", "7"),
        ("Answer: -7.", "-7"),
        ("It is 1,234.50 in all", "1234.50"),
        ("5 - 9 = -4", "-4"),
        (" seven ", "seven"),
        ("", ""),
    ],
)
def test_extracted_answer_is_after_answer_or_the_last_number(completion: str, answer: str) -> None:
    assert reasoning_gym.extract_answer(completion) == answer


@pytest.mark.parametrize(("completion", "reward"), [("3 + 4 = 7", 1.0), ("It is 8.", 0.0)])
async def test_reasoning_gym_reward_is_the_tasks_own_score(completion: str, reward: float) -> None:
    gym = importlib.import_module("reasoning_gym")
    entry = {**gym.create_dataset("chain_sum", seed=0, size=1)[0], "answer": "7"}
    scored = await reasoning_gym.Reward(reasoning_gym.Config()).score(completion, asks(entry))
    assert scored == reward


@pytest_asyncio.fixture
async def verifier() -> AsyncIterator[math_verify.Reward]:
    reward = math_verify.Reward(math_verify.Config(timeout_s=1, max_characters=200))
    yield reward
    await reward.close()


async def test_math_verify_compares_values_not_text(verifier: math_verify.Reward) -> None:
    cases = [
        ("so it is \\boxed{72}", "72", 1.0),
        ("The answer is 71.", "72", 0.0),
        ("$\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{1234}", "1,234", 1.0),
        ("no idea", "72", 0.0),
        ("", "72", 0.0),
        ("x" * 500 + " \\boxed{3}", "3", 1.0),
    ]
    scores = await asyncio.gather(*(verifier.score(text, asks(gold)) for text, gold, _ in cases))
    assert scores == [expected for _, _, expected in cases]


async def test_hanging_completion_scores_zero_and_the_next_is_checked(
    verifier: math_verify.Reward,
) -> None:
    assert await verifier.score("$9^{9^{9^{9^{9}}}}$", asks("72")) == 0.0
    assert await verifier.score("72", asks("72")) == 1.0


async def test_cancelled_score_does_not_answer_the_next_one(verifier: math_verify.Reward) -> None:
    assert await verifier.score("1", asks("1")) == 1.0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(verifier.score("$9^{9^{9^{9^{9}}}}$", asks("2")), 0.01)
    assert await verifier.score("3", asks("4")) == 0.0
    assert await verifier.score("4", asks("4")) == 1.0
