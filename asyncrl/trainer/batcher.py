"""From prompt groups to micro-batches: pure functions, the same result on every rank.

`assign` decides which rank trains which trajectory in which micro-batch; `pack` builds the arrays
of one rank. Nothing here waits, and nothing knows torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.trajectory import PromptGroup, Trajectory


class TrajectoryRef(NamedTuple):
    """Where a trajectory stands in the step's batch."""

    group: int
    """Position of its group in the batch."""
    trajectory: int
    """Position within its group."""
    num_tokens: int
    """Prompt and completion tokens together."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: B sequences padded to L, and their T completion tokens packed."""

    input_ids: NDArray[np.int64]
    """[B, L] prompt and completion, padded on the right.

    Right padding needs no attention mask in a causal model: no token attends to what follows it.
    """
    predictors: NDArray[np.int64]
    """[T] rows of the flattened [B * L] hidden states that predict the completion tokens."""
    tokens: NDArray[np.int64]
    """[T] completion tokens."""
    behavior_logprobs: NDArray[np.float32]
    """[T]"""
    advantages: NDArray[np.float32]
    """[T] the trajectory's advantage, at each of its tokens."""
    token_versions: NDArray[np.int32]
    """[T] policy version that sampled each token."""
    offsets: NDArray[np.int64]
    """[B + 1] where each trajectory starts in the packed arrays."""
    group_ids: NDArray[np.int64]
    """[B] position in the batch of each trajectory's group."""


def assign(
    groups: Sequence[PromptGroup], *, num_ranks: int, micro_batch_tokens: int
) -> list[list[list[TrajectoryRef]]]:
    """Trajectories by rank and micro-batch, balanced over ranks by tokens; deterministic.

    Every rank gets the same number of trajectories, and the same number of micro-batches, because
    ranks enter collectives once a micro-batch. A micro-batch holds at most `micro_batch_tokens`
    padded tokens; a longer single trajectory is a micro-batch of its own.

    Raises ValueError when the trajectories do not divide over the ranks.
    """
    refs = [
        TrajectoryRef(g, t, len(group.prompt_tokens) + len(trajectory.completion_tokens))
        for g, group in enumerate(groups)
        for t, trajectory in enumerate(group.trajectories)
    ]
    if not refs or len(refs) % num_ranks:
        raise ValueError(
            f"{len(refs)} trajectories do not divide over {num_ranks} ranks; make groups a step x "
            "algorithm.group_size a multiple of trainer.num_devices"
        )
    refs.sort(key=lambda ref: (-ref.num_tokens, ref.group, ref.trajectory))
    by_rank = [_cut(share, micro_batch_tokens) for share in _balance(refs, num_ranks)]
    num_micro_batches = max(map(len, by_rank))
    for micro_batches in by_rank:
        _split_until(micro_batches, num_micro_batches)
    return by_rank


def pack(
    groups: Sequence[PromptGroup],
    *,
    rank: int,
    num_ranks: int,
    micro_batch_tokens: int,
    pad_token_id: int,
) -> list[MicroBatch]:
    """The micro-batches of one rank, at least one. Copies: the groups' slots may go afterwards."""
    by_rank = assign(groups, num_ranks=num_ranks, micro_batch_tokens=micro_batch_tokens)
    return [_build(groups, refs, pad_token_id) for refs in by_rank[rank]]


def _balance(refs: Sequence[TrajectoryRef], num_ranks: int) -> list[list[TrajectoryRef]]:
    """Longest first, each to the least loaded rank that still has room."""
    room = len(refs) // num_ranks
    shares: list[list[TrajectoryRef]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for ref in refs:
        rank = min((r for r in range(num_ranks) if len(shares[r]) < room), key=loads.__getitem__)
        shares[rank].append(ref)
        loads[rank] += ref.num_tokens
    return shares


def _cut(refs: Sequence[TrajectoryRef], micro_batch_tokens: int) -> list[list[TrajectoryRef]]:
    """Runs of `refs` (longest first) whose padded size stays within the budget."""
    micro_batches: list[list[TrajectoryRef]] = [[]]
    for ref in refs:
        current = micro_batches[-1]
        if current and (len(current) + 1) * current[0].num_tokens > micro_batch_tokens:
            micro_batches.append([ref])
        else:
            current.append(ref)
    return micro_batches


def _split_until(micro_batches: list[list[TrajectoryRef]], num: int) -> None:
    """Halves the largest micro-batch until there are `num`; possible as num <= trajectories."""
    while len(micro_batches) < num:
        largest = max(range(len(micro_batches)), key=lambda i: len(micro_batches[i]))
        refs = micro_batches[largest]
        assert len(refs) > 1
        micro_batches[largest : largest + 1] = [refs[: len(refs) // 2], refs[len(refs) // 2 :]]


def _build(
    groups: Sequence[PromptGroup], refs: Sequence[TrajectoryRef], pad_token_id: int
) -> MicroBatch:
    """Arrays of one micro-batch."""
    max_length = max(ref.num_tokens for ref in refs)
    input_ids = np.full((len(refs), max_length), pad_token_id, np.int64)
    trajectories: list[Trajectory] = []
    first_predictors = np.empty(len(refs), np.int64)
    for row, ref in enumerate(refs):
        prompt = groups[ref.group].prompt_tokens
        trajectory = groups[ref.group].trajectories[ref.trajectory]
        input_ids[row, : len(prompt)] = prompt
        input_ids[row, len(prompt) : ref.num_tokens] = trajectory.completion_tokens
        first_predictors[row] = row * max_length + len(prompt) - 1
        trajectories.append(trajectory)
    lengths = np.array([len(t.completion_tokens) for t in trajectories])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return MicroBatch(
        input_ids=input_ids,
        predictors=np.repeat(first_predictors, lengths) + within,
        tokens=np.concatenate([t.completion_tokens for t in trajectories]).astype(np.int64),
        behavior_logprobs=np.concatenate([t.behavior_logprobs for t in trajectories]),
        advantages=np.repeat(np.array([t.advantage for t in trajectories], np.float32), lengths),
        token_versions=np.concatenate([t.token_versions for t in trajectories]),
        offsets=offsets,
        group_ids=np.array([ref.group for ref in refs], np.int64),
    )
