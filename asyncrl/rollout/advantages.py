"""A group's rewards become its advantages; the arithmetic is `asyncrl.kernels`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from asyncrl.config import Algorithm, Overlong
from asyncrl.kernels import group_advantages
from asyncrl.trajectory import Trajectory


def overlong_penalty(num_tokens: int, *, overlong: Overlong, max_response_tokens: int) -> float:
    """What is added to the reward of a completion of `num_tokens`, in [-penalty, 0].

    Equation 13 of DAPO (arXiv 2503.14476 §3.4): 0 up to max_response_tokens - buffer_tokens, then
    linear down to -penalty at max_response_tokens.
    """
    excess = num_tokens - (max_response_tokens - overlong.buffer_tokens)
    return min(0.0, -excess / overlong.buffer_tokens * overlong.penalty)


def with_advantages(
    trajectories: Sequence[Trajectory], *, algorithm: Algorithm, max_response_tokens: int
) -> list[Trajectory]:
    """The group's trajectories with advantages, centred on the group.

    A trajectory's `reward` stays what the reward gave, so that runs with and without the overlong
    penalty compare; only the advantage sees the penalty.
    """
    shaped = np.array([t.reward for t in trajectories], dtype=np.float64)
    if algorithm.overlong is not None:
        shaped += [
            overlong_penalty(
                len(t.completion_tokens),
                overlong=algorithm.overlong,
                max_response_tokens=max_response_tokens,
            )
            for t in trajectories
        ]
    offsets = np.array([0, len(trajectories)], dtype=np.int64)
    advantages = group_advantages(shaped, offsets, estimator=algorithm.advantage.estimator)
    return [
        dataclasses.replace(t, advantage=float(a))
        for t, a in zip(trajectories, advantages, strict=True)
    ]
