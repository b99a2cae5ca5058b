"""The one way to wait: with a deadline, and with a name for what is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class DeadlineExceeded(TimeoutError):
    """Something took longer than it may; the message says what, and which setting bounds it."""


async def within(work: Awaitable[T], seconds: float, what: str) -> T:
    """The result of `work`; DeadlineExceeded with `what` when it is not there in time."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError as error:
        # One that `work` itself raised names its own cause.
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"waited {seconds:g} s for {what}") from error
