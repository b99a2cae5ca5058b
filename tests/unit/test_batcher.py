"""Packing: who trains what, and where each completion token ends up."""

import numpy as np
import pytest

from asyncrl.trainer.batcher import assign, pack
from asyncrl.trajectory import FinishReason, PromptGroup, Trajectory


def group(index: int, prompt: list[int], completions: list[list[int]]) -> PromptGroup:
    trajectories = [
        Trajectory(
            completion_tokens=np.array(tokens, np.int32),
            behavior_logprobs=-0.1 * np.array(tokens, np.float32),
            token_versions=np.arange(len(tokens), dtype=np.int32),
            finish_reason=FinishReason.STOP,
            advantage=float(10 * index + i),
        )
        for i, tokens in enumerate(completions)
    ]
    return PromptGroup(index, np.array(prompt, np.int32), trajectories)


def groups_of_lengths(lengths: list[int]) -> list[PromptGroup]:
    """Groups of two completions each, prompts of one token."""
    pairs = zip(lengths[::2], lengths[1::2], strict=True)
    return [group(i, [2], [[3] * a, [3] * b]) for i, (a, b) in enumerate(pairs)]


def test_micro_batch_holds_prompts_completions_and_their_predictors_longest_first() -> None:
    groups = [group(0, [5, 6, 7], [[8], [9, 10]]), group(1, [4], [[11, 12, 13, 14], [15]])]

    (micro_batch,) = pack(groups, rank=0, num_ranks=1, micro_batch_tokens=100, pad_token_id=0)

    assert micro_batch.input_ids.tolist() == [
        [5, 6, 7, 9, 10],
        [4, 11, 12, 13, 14],
        [5, 6, 7, 8, 0],
        [4, 15, 0, 0, 0],
    ]
    assert micro_batch.tokens.tolist() == [9, 10, 11, 12, 13, 14, 8, 15]
    # The hidden state one position before a token predicts it.
    predicted = micro_batch.input_ids.ravel()[micro_batch.predictors + 1]
    assert predicted.tolist() == micro_batch.tokens.tolist()
    assert micro_batch.offsets.tolist() == [0, 2, 6, 7, 8]
    assert micro_batch.group_ids.tolist() == [0, 1, 0, 1]
    assert micro_batch.advantages.tolist() == [1, 1, 10, 10, 10, 10, 0, 11]
    assert micro_batch.token_versions.tolist() == [0, 1, 0, 1, 2, 3, 0, 0]
    np.testing.assert_allclose(micro_batch.behavior_logprobs, -0.1 * micro_batch.tokens, rtol=1e-6)


def test_ranks_get_equally_many_trajectories_and_nearly_equally_many_tokens() -> None:
    lengths = [40, 1, 2, 30, 10, 9, 8, 11]

    by_rank = assign(groups_of_lengths(lengths), num_ranks=2, micro_batch_tokens=10_000)

    shares = [[ref for refs in rank for ref in refs] for rank in by_rank]
    assert [len(share) for share in shares] == [4, 4]
    # Longest first to the lighter rank: 41+11+9+2 | 31+12+10+3, prompts of one token included.
    assert [sum(ref.num_tokens for ref in share) for share in shares] == [63, 56]
    assert len({(ref.group, ref.trajectory) for share in shares for ref in share}) == 8


@pytest.mark.parametrize("budget", [1, 12, 64, 10_000])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_has_equally_many_non_empty_micro_batches_within_the_budget(
    budget: int, num_ranks: int
) -> None:
    groups = groups_of_lengths([60, 1, 1, 1, 2, 2, 30, 3])

    by_rank = assign(groups, num_ranks=num_ranks, micro_batch_tokens=budget)

    assert len({len(micro_batches) for micro_batches in by_rank}) == 1
    for refs in (refs for micro_batches in by_rank for refs in micro_batches):
        padded = len(refs) * max(ref.num_tokens for ref in refs)
        assert padded <= budget or len(refs) == 1


def test_trajectories_that_do_not_divide_over_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="4 trajectories do not divide over 3 ranks"):
        assign(groups_of_lengths([1, 2, 3, 4]), num_ranks=3, micro_batch_tokens=8)
