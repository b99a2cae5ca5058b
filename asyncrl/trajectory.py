"""What travels from rollout to trainer: plain numpy records and their packed form in a buffer slot.

Data only. Nothing here waits, computes a loss or knows a process. The packed form is what
`asyncrl.buffer` carries: `write_group` fills a slot in place, `read_group` returns views into it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class FinishReason(IntEnum):
    """Why a completion ended."""

    STOP = 0
    LENGTH = 1


@dataclass(frozen=True)
class Trajectory:
    """One completion of a prompt, with everything the trainer needs. L = completion length >= 1."""

    completion_tokens: NDArray[np.int32]
    """[L] sampled token ids, the stop token included."""
    behavior_logprobs: NDArray[np.float32]
    """[L] log-probability of each token under the policy version that sampled it."""
    token_versions: NDArray[np.int32]
    """[L] policy version that sampled each token; never decreasing."""
    finish_reason: FinishReason
    reward: float = 0.0
    advantage: float = 0.0


@dataclass(frozen=True)
class PromptGroup:
    """A prompt and its n completions: the unit that is admitted, delivered and trained whole."""

    prompt_index: int
    """Position of the prompt in the run's prompt stream."""
    prompt_tokens: NDArray[np.int32]
    """[P] token ids of the prompt."""
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Completion tokens of the whole group."""
        return sum(len(t.completion_tokens) for t in self.trajectories)

    def token_versions(self) -> NDArray[np.int32]:
        """[T] versions of all completion tokens, trajectories one after another."""
        return np.concatenate([t.token_versions for t in self.trajectories])


def version_segments(token_versions: NDArray[np.int32]) -> NDArray[np.int64]:
    """[M, 2] rows (token_start, policy_version), one for each run of equal versions in [T]."""
    starts = np.flatnonzero(np.diff(token_versions, prepend=token_versions[0] - 1))
    return np.stack([starts, token_versions[starts]], axis=1).astype(np.int64)


_HEADER = 4  # int64: prompt_index, n, P, T


def _layout(n: int, num_prompt_tokens: int, num_tokens: int) -> list[tuple[str, type, int]]:
    """Arrays of a packed group in order; 8-byte types first so that every view is aligned."""
    return [
        ("header", np.int64, _HEADER),
        ("offsets", np.int64, n + 1),
        ("rewards", np.float64, n),
        ("advantages", np.float64, n),
        ("finish_reasons", np.int32, n),
        ("prompt_tokens", np.int32, num_prompt_tokens),
        ("completion_tokens", np.int32, num_tokens),
        ("token_versions", np.int32, num_tokens),
        ("behavior_logprobs", np.float32, num_tokens),
    ]


def group_num_bytes(group: PromptGroup) -> int:
    """Bytes that `write_group` needs for this group."""
    layout = _layout(len(group.trajectories), len(group.prompt_tokens), group.num_tokens)
    return sum(np.dtype(dtype).itemsize * count for _, dtype, count in layout)


def _views(
    payload: NDArray[np.uint8], n: int, num_prompt_tokens: int, num_tokens: int
) -> dict[str, NDArray[Any]]:
    views: dict[str, NDArray[Any]] = {}
    start = 0
    for name, dtype, count in _layout(n, num_prompt_tokens, num_tokens):
        end = start + np.dtype(dtype).itemsize * count
        views[name] = payload[start:end].view(dtype)
        start = end
    return views


def write_group(group: PromptGroup, payload: NDArray[np.uint8]) -> None:
    """Packs a group into `payload` ([group_num_bytes(group)] uint8), in place."""
    trajectories = group.trajectories
    views = _views(payload, len(trajectories), len(group.prompt_tokens), group.num_tokens)
    lengths = [len(t.completion_tokens) for t in trajectories]
    views["header"][:] = [group.prompt_index, len(lengths), len(group.prompt_tokens), sum(lengths)]
    views["offsets"][:] = np.cumsum([0, *lengths])
    views["rewards"][:] = [t.reward for t in trajectories]
    views["advantages"][:] = [t.advantage for t in trajectories]
    views["finish_reasons"][:] = [int(t.finish_reason) for t in trajectories]
    views["prompt_tokens"][:] = group.prompt_tokens
    for name in ("completion_tokens", "token_versions", "behavior_logprobs"):
        np.concatenate([getattr(t, name) for t in trajectories], out=views[name])


def read_group(payload: NDArray[np.uint8]) -> PromptGroup:
    """The group packed in `payload`; its arrays are views, valid while the slot is leased."""
    prompt_index, n, num_prompt_tokens, num_tokens = payload[: _HEADER * 8].view(np.int64).tolist()
    views = _views(payload, n, num_prompt_tokens, num_tokens)
    offsets = views["offsets"].tolist()
    trajectories = [
        Trajectory(
            completion_tokens=views["completion_tokens"][start:end],
            behavior_logprobs=views["behavior_logprobs"][start:end],
            token_versions=views["token_versions"][start:end],
            finish_reason=FinishReason(int(views["finish_reasons"][i])),
            reward=float(views["rewards"][i]),
            advantage=float(views["advantages"][i]),
        )
        for i, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True))
    ]
    return PromptGroup(prompt_index, views["prompt_tokens"], trajectories)
