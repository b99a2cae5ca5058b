from __future__ import annotations

import asyncio

import pytest

from asyncrl.deadline import DeadlineExceeded, within


def test_a_passed_deadline_says_what_was_waited_for() -> None:
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for the trainer"):
        asyncio.run(within(asyncio.Event().wait(), 0.01, "the trainer"))


def test_a_timeout_within_the_work_keeps_its_own_cause() -> None:
    async def fails() -> None:
        raise TimeoutError("the socket")

    with pytest.raises(TimeoutError, match="the socket") as error:
        asyncio.run(within(fails(), 60, "the trainer"))
    assert not isinstance(error.value, DeadlineExceeded)
