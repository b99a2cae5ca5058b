"""What a task group's failure comes down to."""

from __future__ import annotations


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure of a group of tasks; the others are its echoes."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
