"""One data-parallel trainer rank: takes prompt groups, trains on its share, writes weights.

Knows no ray and no event loop; whoever holds the ranks calls the same method on all of them. The
mathematics of a step is in `step`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from asyncrl import plugins
from asyncrl.buffer import Handle, Lease, TrajectoryBuffer
from asyncrl.config import Config
from asyncrl.interfaces import StepReport
from asyncrl.trainer.batch import Batch
from asyncrl.trainer.batcher import pack
from asyncrl.trainer.model import Policy, load_model
from asyncrl.trainer.parallel import (
    broadcast_object,
    export_weights,
    init_process_group,
    save_pretrained_folder,
    shard,
)
from asyncrl.trainer.step import Learner, NonFiniteStep
from asyncrl.trajectory import FinishReason, PromptGroup, read_group


class BatchFailed(RuntimeError):
    """Rank 0 could not fill a batch; raised on every rank."""


@dataclass(frozen=True)
class _Delivery:
    """What rank 0 tells all ranks about the step's batch."""

    handles: list[Handle]
    trainer_version: int
    num_refilled: int
    """Groups evicted because a token was too stale."""
    error: str | None = None


class TrainerRank:
    """One of `num_ranks` ranks that call `start`, `step`, ... in the same order."""

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        num_ranks: int,
        model_folder: Path,
        buffer_name: str,
        run_dir: Path,
    ) -> None:
        self._config = config
        self._rank = rank
        self._num_ranks = num_ranks
        self._model_folder = model_folder
        self._buffer_name = buffer_name
        self._run_dir = run_dir
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.trainer.dtype]
        self._step = 0
        self._has_started = False
        self._leases: list[Lease] = []

    def start(self, rendezvous: str) -> None:
        """Joins the ranks at `rendezvous` ("tcp://host:port"), loads and shards the model."""
        config = self._config
        module = plugins.load("devices", config.device)
        device = module.Device(module.Config())
        device.set_threads(config.trainer.num_threads)
        self._device = device.select(self._rank)
        deadlines = config.deadlines
        init_process_group(
            rendezvous,
            rank=self._rank,
            num_ranks=self._num_ranks,
            backend=device.backend,
            # Other ranks wait in a collective while rank 0 waits for the batch.
            timeout_s=max(deadlines.start_s, config.completion_s + deadlines.step_s),
        )
        torch.manual_seed(config.run.seed)
        self._policy = self._load_policy(is_trained=True)
        has_penalty = config.algorithm.kl.coefficient > 0
        reference = self._load_policy(is_trained=False) if has_penalty else None
        self._learner = Learner(
            config, policy=self._policy, reference=reference, device=self._device
        )
        self._buffer = TrajectoryBuffer.attach(self._buffer_name)
        self._has_started = True

    def step(self) -> StepReport:
        """One optimizer step.

        consumes: R ready prompt groups; produces: new weights, R released groups; waits for: the
        groups, at most `Config.completion_s`; unblocked by: the rollout workers.
        """
        started = time.monotonic()
        delivery = self._receive()
        wait_s = time.monotonic() - started
        self._step += 1
        groups = [read_group(self._buffer.view(handle)) for handle in delivery.handles]
        batch = self._batch(groups, delivery)
        metrics = _group_metrics(groups)
        try:
            result = self._learner.run(batch, step=self._step)
        except NonFiniteStep:
            self._keep_for_inspection(batch)
            raise
        self._release(result.is_group_trained)
        step_s = time.monotonic() - started - wait_s
        metrics |= result.metrics
        metrics["trainer/refilled_groups"] = float(delivery.num_refilled)
        metrics["trainer/wait_s"] = wait_s
        metrics["trainer/step_s"] = step_s
        metrics["trainer/idle_share"] = wait_s / (wait_s + step_s)
        return StepReport(self._step, metrics)

    def export_weights(self, folder: Path) -> None:
        """Writes the weights to `folder`/model.safetensors; complete when rank 0 returns."""
        export_weights(self._policy.model, folder, dtype=self._dtype)

    def save_model(self, folder: Path) -> None:
        """Writes the current model as a folder that transformers and vLLM load."""
        save_pretrained_folder(self._policy.model, self._model_folder, folder, dtype=self._dtype)

    def close(self) -> None:
        """Leaves the process group and the buffer; nothing to leave before `start` is through."""
        if not self._has_started:
            return
        self._buffer.detach()
        # Sharded modules hold on to the group; they must not outlive it.
        del self._learner, self._policy
        dist.destroy_process_group()

    def _load_policy(self, *, is_trained: bool) -> Policy:
        checkpointing = is_trained and self._config.trainer.gradient_checkpointing
        model = load_model(
            self._model_folder, dtype=torch.float32, gradient_checkpointing=checkpointing
        )
        policy = Policy(model, temperature=self._config.rollout.temperature)
        policy.requires_grad_(is_trained)
        shard(policy, device=self._device, dtype=self._dtype)
        return policy

    def _receive(self) -> _Delivery:
        """The batch that rank 0 took; BatchFailed everywhere when it could not."""
        taken = None
        if self._rank == 0:
            try:
                taken = self._take()
            except Exception as error:
                # The other ranks already wait for this broadcast and would learn nothing else.
                broadcast_object(_Delivery([], 0, 0, error=f"{type(error).__name__}: {error}"))
                raise
        delivery: _Delivery = broadcast_object(taken)
        if delivery.error is not None:
            raise BatchFailed(f"step {self._step + 1}: rank 0 has no batch: {delivery.error}")
        return delivery

    def _take(self) -> _Delivery:
        """R groups in admission order; too stale ones are replaced under `async.stale: refill`."""
        needed = self._config.groups_per_step
        deadline = time.monotonic() + self._config.completion_s
        trainer_version = self._buffer.stats()["trainer_version"]
        oldest = trainer_version - self._config.max_staleness
        num_refilled = 0
        while len(self._leases) < needed:
            lease = self._buffer.take(max(0.0, deadline - time.monotonic()))
            if self._config.asynchrony.stale == "refill" and lease.min_version < oldest:
                self._buffer.evict(lease, "stale", requeue=True)
                num_refilled += 1
            else:
                self._leases.append(lease)
        handles = [lease.handle for lease in self._leases]
        return _Delivery(handles, trainer_version, num_refilled)

    def _batch(self, groups: Sequence[PromptGroup], delivery: _Delivery) -> Batch:
        pad_token_id = self._policy.model.generation_config.pad_token_id
        micro_batches = pack(
            groups,
            rank=self._rank,
            num_ranks=self._num_ranks,
            micro_batch_tokens=self._config.trainer.micro_batch_tokens,
            pad_token_id=0 if pad_token_id is None else pad_token_id,
        )
        return Batch(micro_batches, len(groups), delivery.trainer_version, self._device)

    def _release(self, is_group_trained: Sequence[bool]) -> None:
        """Gives the slots back on rank 0, which holds the leases."""
        if self._rank == 0:
            for lease, is_trained in zip(self._leases, is_group_trained, strict=True):
                self._buffer.release(lease, "trained" if is_trained else "rejected")
            self._leases.clear()

    def _keep_for_inspection(self, batch: Batch) -> None:
        """Saves this rank's arrays of a step that failed, one file a micro-batch."""
        folder = self._run_dir / "failed_step"
        folder.mkdir(parents=True, exist_ok=True)
        for index, micro_batch in enumerate(batch.micro_batches):
            np.savez(folder / f"rank{self._rank}-{index}.npz", **vars(micro_batch))


def _group_metrics(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Of all ranks' trajectories: every rank reads all groups."""
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = np.array([t.reward for t in trajectories])
    lengths = [len(t.completion_tokens) for t in trajectories]
    multi_version = [t.token_versions[0] != t.token_versions[-1] for t in trajectories]
    truncated = [t.finish_reason == FinishReason.LENGTH for t in trajectories]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "completion/length_mean": float(np.mean(lengths)),
        "completion/truncated_share": float(np.mean(truncated)),
        "completion/multi_version_share": float(np.mean(multi_version)),
    }
