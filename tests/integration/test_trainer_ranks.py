"""Trainer ranks on real parts: FSDP2 over gloo, a real buffer filled with made-up prompt groups."""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.buffer import TrajectoryBuffer
from asyncrl.config import Config
from asyncrl.trainer.batcher import pack
from asyncrl.trainer.model import completion_logprobs, load_model, prepare_model_folder
from asyncrl.trainer.rank import TrainerRank
from asyncrl.trainer.step import AllBatchesRejected, Correction, NonFiniteStep
from asyncrl.trajectory import FinishReason, PromptGroup, Trajectory

TIMEOUT_S = 30.0


def rendezvous() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def group(rng: np.random.Generator, *, index: int, version: int = 0) -> PromptGroup:
    """Four completions of unequal lengths, as if sampled near the initial model."""
    lengths = rng.integers(1, 8, 4)
    advantages = rng.normal(size=4)
    return PromptGroup(
        index,
        rng.integers(2, 11, rng.integers(2, 6)).astype(np.int32),
        [
            Trajectory(
                completion_tokens=rng.integers(1, 11, length).astype(np.int32),
                behavior_logprobs=rng.normal(-2.2, 0.3, length).astype(np.float32),
                token_versions=np.full(length, version, np.int32),
                finish_reason=FinishReason.STOP,
                reward=float(advantage + 1),
                advantage=float(advantage),
            )
            for length, advantage in zip(lengths, advantages, strict=True)
        ],
    )


@contextlib.contextmanager
def buffer_of(config: Config) -> Iterator[TrajectoryBuffer]:
    buffer = TrajectoryBuffer.create(
        f"test-{uuid.uuid4().hex[:8]}",
        staleness_threshold=config.asynchrony.staleness_threshold,
        groups_per_version=config.groups_per_version,
        lookahead=config.asynchrony.lookahead,
        capacity_bytes=config.buffer.capacity_bytes,
    )
    try:
        yield buffer
    finally:
        buffer.unlink()


def fill(buffer: TrajectoryBuffer, num_groups: int) -> None:
    rng = np.random.default_rng(7)
    for index in range(num_groups):
        put(buffer, group(rng, index=index))


def put(buffer: TrajectoryBuffer, prompt_group: PromptGroup) -> None:
    buffer.put_group(buffer.admit(TIMEOUT_S), prompt_group)


@dataclass
class OneRank:
    """A single rank in this process, its buffer, and where it writes."""

    rank: TrainerRank
    buffer: TrajectoryBuffer
    model_folder: Path
    run_dir: Path

    def weights(self) -> dict[str, torch.Tensor]:
        self.rank.export_weights(self.run_dir / "weights")
        return load_file(self.run_dir / "weights" / "model.safetensors")


@pytest.fixture
def one_rank(
    tiny_config: Callable[..., Config], tmp_path: Path
) -> Iterator[Callable[..., OneRank]]:
    with contextlib.ExitStack() as stack:

        def build(*overrides: str) -> OneRank:
            config = tiny_config(*overrides)
            folder = prepare_model_folder(config.model, tmp_path / "model", seed=1)
            buffer = stack.enter_context(buffer_of(config))
            rank = make_rank(config, 0, folder, buffer.name, tmp_path)
            rank.start(rendezvous())
            stack.callback(rank.close)
            return OneRank(rank, buffer, folder, tmp_path)

        yield build


def make_rank(
    config: Config, rank: int, model_folder: Path, buffer_name: str, run_dir: Path
) -> TrainerRank:
    return TrainerRank(
        config,
        rank=rank,
        num_ranks=config.trainer.num_devices,
        model_folder=model_folder,
        buffer_name=buffer_name,
        run_dir=run_dir,
    )


def two_steps(rank: int, config: Config, folder: Path, name: str, out: Path, address: str) -> None:
    """One process: two optimizer steps, then weights and the reports' metrics in `out`."""
    trainer = make_rank(config, rank, folder, name, out)
    trainer.start(address)
    reports = [trainer.step() for _ in range(2)]
    trainer.export_weights(out)
    trainer.close()
    if rank == 0:
        torch.save([report.metrics for report in reports], out / "metrics.pt")


def test_two_ranks_make_the_same_steps_as_one(
    tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    results = []
    for num_ranks in (1, 2):
        config = tiny_config(
            f"trainer.num_devices={num_ranks}",
            "trainer.lr=1e-4",
            "trainer.micro_batch_tokens=48",
            "algorithm.kl.coefficient=0.1",
            "async.rollout_correction.mode=decoupled",
            "async.rollout_correction.weight.level=sequence",
            "async.rollout_correction.weight.normalize=batch",
            "async.rollout_correction.reject=[{aggregate: token, bounds: [0.5, 2.0]}]",
        )
        folder = prepare_model_folder(config.model, tmp_path / "model", seed=1)
        out = tmp_path / f"ranks{num_ranks}"
        out.mkdir()
        with buffer_of(config) as buffer:
            fill(buffer, 2 * config.groups_per_step)
            args = (config, folder, buffer.name, out, rendezvous())
            if num_ranks == 1:
                two_steps(0, *args)
            else:
                mp.spawn(two_steps, args, nprocs=num_ranks)
        results.append((torch.load(out / "metrics.pt"), load_file(out / "model.safetensors")))

    (one_metrics, one_weights), (two_metrics, two_weights) = results
    for one, two in zip(one_metrics, two_metrics, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
        assert one["grad_norm"] > 0
        assert 0 < one["correction/rejected_token_fraction"] < 1
        timed = {"trainer/wait_s", "trainer/step_s", "trainer/idle_share"}
        assert one.keys() == two.keys()
        for name in one.keys() - timed:
            assert one[name] == pytest.approx(two[name], rel=1e-4, abs=1e-5), name
    for name, weight in one_weights.items():
        torch.testing.assert_close(weight, two_weights[name], atol=1e-6, rtol=0)


def test_a_step_raises_the_logprobs_of_rewarded_completions(one_rank) -> None:
    trainer = one_rank("trainer.lr=1e-3", "async.rollout_correction=none")
    rng = np.random.default_rng(0)
    groups = [group(rng, index=i) for i in range(4)]
    before = logprobs_by_trajectory(trainer.model_folder, groups)
    for prompt_group in groups:
        put(trainer.buffer, prompt_group)

    report = trainer.rank.step()

    trainer.rank.save_model(trainer.run_dir / "final")
    gained = logprobs_by_trajectory(trainer.run_dir / "final", groups) - before
    advantages = np.array([t.advantage for g in groups for t in g.trajectories])
    lengths = np.array([len(t.completion_tokens) for g in groups for t in g.trajectories])
    # First order: the objective, sum of advantage x log-prob, goes up.
    assert (gained * advantages).sum() > 0
    assert report.step == 1
    assert report.metrics["reward/mean"] == pytest.approx((advantages + 1).mean())
    assert report.metrics["completion/length_mean"] == lengths.mean()
    assert report.metrics["lr"] == 1e-3
    assert report.metrics["trainer/tokens"] == lengths.sum()
    assert trainer.buffer.stats()["num_trained"] == 4


def logprobs_by_trajectory(folder: Path, groups: list[PromptGroup]) -> np.ndarray:
    model = load_model(folder, dtype=torch.float32, gradient_checkpointing=False)
    result = []
    for prompt_group in groups:
        for trajectory in prompt_group.trajectories:
            alone = [PromptGroup(0, prompt_group.prompt_tokens, [trajectory])]
            packed = pack(alone, rank=0, num_ranks=1, micro_batch_tokens=99, pad_token_id=0)
            with torch.no_grad():
                logprobs, _ = completion_logprobs(model, packed[0], temperature=1.0)
            result.append(float(logprobs.sum()))
    return np.array(result)


def test_saved_model_reloads_bit_equal_with_its_tokenizer(one_rank) -> None:
    trainer = one_rank()
    fill(trainer.buffer, 4)
    trainer.rank.step()

    trainer.rank.save_model(trainer.run_dir / "final")

    reloaded = AutoModelForCausalLM.from_pretrained(trainer.run_dir / "final").state_dict()
    exported = trainer.weights()
    initial = load_file(trainer.model_folder / "model.safetensors")
    assert exported.keys() == reloaded.keys() == initial.keys()
    assert all(torch.equal(exported[name], reloaded[name]) for name in exported)
    assert not torch.equal(exported["lm_head.weight"], initial["lm_head.weight"])
    tokenizer = AutoTokenizer.from_pretrained(trainer.run_dir / "final")
    assert tokenizer("ab")["input_ids"] == [2, 3]


def test_tokens_beyond_the_bound_are_masked_and_counted(one_rank) -> None:
    trainer = one_rank("async.stale=mask", "async.rollout_correction=none")
    bound = 1
    rng = np.random.default_rng(0)
    for version in range(1, bound + 2):
        trainer.buffer.cut_version(version)
    groups = [group(rng, index=i, version=0 if i == 0 else bound + 1) for i in range(4)]
    for prompt_group in groups:
        put(trainer.buffer, prompt_group)

    metrics = trainer.rank.step().metrics

    assert metrics["policy_version"] == bound + 1
    assert metrics["staleness/bound"] == bound
    assert metrics["staleness/token_max"] == bound + 1
    assert metrics["staleness/masked_tokens"] == groups[0].num_tokens
    assert metrics["trainer/num_trained_tokens"] == sum(g.num_tokens for g in groups[1:])
    assert metrics["trainer/rejected_groups"] == 1
    stats = trainer.buffer.stats()
    assert (stats["num_trained"], stats["num_rejected"]) == (3, 1)


def test_stale_group_is_replaced_under_refill(one_rank) -> None:
    trainer = one_rank("async.stale=refill")
    rng = np.random.default_rng(0)
    trainer.buffer.cut_version(1)
    trainer.buffer.cut_version(2)
    for index in range(5):
        put(trainer.buffer, group(rng, index=index, version=0 if index == 0 else 2))

    metrics = trainer.rank.step().metrics

    assert metrics["trainer/refilled_groups"] == 1
    assert metrics["staleness/token_max"] == 0
    stats = trainer.buffer.stats()
    assert (stats["num_trained"], stats["num_evicted"]) == (4, 1)


def test_rejected_batch_changes_nothing_and_too_many_end_the_run(one_rank) -> None:
    trainer = one_rank(
        "trainer.max_rejected_batches=1",
        "async.rollout_correction.weight=null",
        "async.rollout_correction.reject=[{aggregate: sum, bounds: [1e9, null]}]",
    )
    fill(trainer.buffer, 8)
    before = trainer.weights()

    metrics = trainer.rank.step().metrics

    assert metrics["trainer/rejected_groups"] == 4
    assert metrics["correction/rejected_sequence_fraction"] == 1
    assert trainer.buffer.stats()["num_rejected"] == 4
    after = trainer.weights()
    assert all(torch.equal(after[name], before[name]) for name in before)
    with pytest.raises(AllBatchesRejected, match=r"2 batches in a row.*max_rejected_batches=1"):
        trainer.rank.step()


def test_step_that_leaves_out_the_configured_correction_is_an_error(
    one_rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = one_rank()
    fill(trainer.buffer, 4)
    monkeypatch.setattr(
        trainer.rank._learner,
        "_correct",
        lambda _batch, _proximal, fresh: Correction(fresh, None, num_compared_tokens=0),
    )
    with pytest.raises(AssertionError, match="rollout correction ran on 0 tokens, due were"):
        trainer.rank.step()


def test_non_finite_loss_ends_the_run_and_keeps_the_batch(one_rank) -> None:
    trainer = one_rank("async.rollout_correction=none")
    rng = np.random.default_rng(0)
    for index in range(4):
        prompt_group = group(rng, index=index)
        if index == 2:
            bad = prompt_group.trajectories[0]
            prompt_group.trajectories[0] = Trajectory(**{**vars(bad), "advantage": float("nan")})
        put(trainer.buffer, prompt_group)
    before = trainer.weights()

    with pytest.raises(NonFiniteStep, match=r"step 1: loss nan.*trainer\.lr"):
        trainer.rank.step()

    after = trainer.weights()
    assert all(torch.equal(after[name], before[name]) for name in before)
    saved = np.load(trainer.run_dir / "failed_step" / "rank0-0.npz")
    assert np.isnan(saved["advantages"]).any()
