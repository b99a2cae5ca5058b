"""One optimizer step on one rank, as a list of named phases. `Learner.run` reads straight down.

    stale tokens masked -> proximal log-probs -> correction -> denominators
        -> loss and gradients, a micro-batch at a time -> clipping -> update -> metrics

All ranks run the same phases in the same order, since most of them enter collectives. Not here:
where the batch comes from (`rank`), how a rank's share is cut (`batcher`), any formula (`losses`,
`asyncrl.kernels`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl import plugins
from asyncrl.config import Config
from asyncrl.kernels import (
    importance_weights,
    off_policy_metrics,
    rejection_mask,
    weight_normalizer,
)
from asyncrl.losses import LossInputs
from asyncrl.trainer.batch import Batch
from asyncrl.trainer.batcher import MicroBatch
from asyncrl.trainer.model import Policy
from asyncrl.trainer.parallel import all_reduce_max, all_reduce_sum, gather_objects


class NonFiniteStep(RuntimeError):
    """The loss or the gradient norm of a step is not a finite number."""


class AllBatchesRejected(RuntimeError):
    """More batches in a row than allowed had no trained token."""


@dataclass(frozen=True)
class Correction:
    """What is done about tokens of another policy. Both tensors are [T]."""

    loss_mask: Tensor
    """bool, True = trained: neither stale nor rejected."""
    weights: Tensor | None
    """float32 importance weights, truncated and normalised; None = all 1."""
    num_compared_tokens: int
    """Tokens whose proximal and behavior log-probs the rules were applied to; 0: none was due."""


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on every rank."""

    metrics: dict[str, float]
    is_group_trained: list[bool]
    """[R] False: every token of the group was stale or rejected."""


@dataclass
class _Gradients:
    """What the backward passes leave, for this rank."""

    loss: float
    current_logprobs: Tensor
    """[T]"""
    entropy_sum: float
    """Over trained tokens."""
    loss_metrics: list[dict[str, float]]


class Learner:
    """Owns the policy's optimizer, and the frozen initial policy when there is a KL penalty."""

    def __init__(
        self, config: Config, *, policy: Policy, reference: Policy | None, device: torch.device
    ) -> None:
        self._config = config
        self._correction = config.asynchrony.rollout_correction
        self._policy = policy
        self._reference = reference
        self._device = device
        self._loss = plugins.load("losses", config.algorithm.loss.type).loss
        self._loss_config = config.algorithm.loss.settings("losses")
        self._parameters = [p for p in policy.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=learning_rate(config, step=1),
            weight_decay=config.trainer.weight_decay,
            foreach=True,
        )
        self._num_rejected_in_a_row = 0

    def run(self, batch: Batch, *, step: int) -> StepResult:
        """One optimizer step. Collective.

        Raises NonFiniteStep, and AllBatchesRejected when the last of too many in a row.
        """
        fresh = batch.staleness <= self._config.max_staleness
        forward = self._only_forward(batch)
        proximal = self._proximal_logprobs(batch, forward)
        correction = self._correct(batch, proximal, fresh)
        trained = batch.num_trained_tokens(correction.loss_mask)
        counts = self._counts(batch, correction, trained)
        groups = self._trained_groups(batch, trained)
        if counts["kept"] == 0:
            self._skip(step)
            gradients, grad_norm = self._no_gradients(batch, proximal), 0.0
        else:
            gradients = self._accumulate(batch, proximal, correction, counts, forward)
            loss = self._sum({"loss": gradients.loss})["loss"]
            grad_norm = self._clip_gradients()
            self._check_finite(step, loss, grad_norm, counts)
            self._update(step)
        metrics = self._metrics(batch, correction, fresh, gradients, counts)
        metrics |= {"grad_norm": grad_norm, "lr": learning_rate(self._config, step=step)}
        metrics["trainer/rejected_groups"] = float(groups.count(False))
        self._assert_corrected(batch, correction)
        return StepResult(metrics, groups)

    # Phases, in order.

    def _only_forward(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """The forward pass of a batch of one micro-batch, with gradient.

        Weights do not change within a step, so its log-probs are the proximal ones too and a
        second pass would only repeat them. Ranks agree: they have equally many micro-batches.
        """
        if len(batch.micro_batches) > 1:
            return None
        logprobs, entropy = self._policy(batch.micro_batches[0])
        return logprobs, entropy.detach()

    def _proximal_logprobs(
        self, batch: Batch, forward: tuple[Tensor, Tensor] | None
    ) -> Tensor | None:
        """[T] log-probs under the weights before the update; None: nothing needs them beforehand.

        In bypass mode rejection compares with the current policy, which is the same thing here.
        """
        if forward is not None:
            return forward[0].detach()
        if not self._correction.is_active:
            return None
        with torch.no_grad():
            return torch.cat([self._policy(m)[0] for m in batch.micro_batches])

    def _correct(self, batch: Batch, proximal: Tensor | None, fresh: Tensor) -> Correction:
        """Rejects first, so that the weights' normaliser counts only what is trained."""
        table = self._correction
        if not table.is_active:
            return Correction(fresh, None, 0)
        assert proximal is not None
        arrays = (proximal, batch.behavior_logprobs, batch.offsets)
        rules = [(r.statistic, r.aggregate, *r.bounds) for r in table.reject]
        kept = rejection_mask(*arrays, fresh, rules=rules, veto=table.veto, compat=table.compat)
        if table.weight is None:
            return Correction(kept, None, len(proximal))
        rule = table.weight
        weights = importance_weights(
            *arrays, kept, level=rule.level, bounds=rule.bounds, outside=rule.outside
        )
        if rule.normalize == "batch":
            total, count = weight_normalizer(weights, batch.offsets, kept, level=rule.level)
            sums = self._sum({"weight": total, "count": float(count)})
            if sums["weight"] > 0:
                weights = weights * (sums["count"] / sums["weight"])
        return Correction(kept, weights, len(proximal))

    def _counts(self, batch: Batch, correction: Correction, trained: Tensor) -> dict[str, float]:
        """Trained tokens and trajectories with one, and all tokens, over all ranks."""
        return self._sum(
            {
                "kept": float(correction.loss_mask.sum()),
                "kept_trajectories": float((trained > 0).sum()),
                "all": float(len(batch.behavior_logprobs)),
            }
        )

    def _trained_groups(self, batch: Batch, trained: Tensor) -> list[bool]:
        """[R] whether any token of the group is trained, on whichever rank."""
        totals = torch.zeros(batch.num_groups, dtype=torch.float64, device=self._device)
        totals.index_add_(0, batch.group_ids, trained)
        dist.all_reduce(totals)
        return [total > 0 for total in totals.tolist()]

    def _skip(self, step: int) -> None:
        """Counts a batch without a trained token; too many in a row are an error."""
        self._num_rejected_in_a_row += 1
        allowed = self._config.trainer.max_rejected_batches
        if self._num_rejected_in_a_row > allowed:
            raise AllBatchesRejected(
                f"step {step}: {self._num_rejected_in_a_row} batches in a row had every token "
                f"rejected or stale, more than trainer.max_rejected_batches={allowed}; widen "
                "the bounds of async.rollout_correction, or check that the engine and the trainer "
                "compute the same log-probs (correction/* in metrics.jsonl)"
            )

    def _accumulate(
        self,
        batch: Batch,
        proximal: Tensor | None,
        correction: Correction,
        counts: Mapping[str, float],
        forward: tuple[Tensor, Tensor] | None,
    ) -> _Gradients:
        """Forward and backward of every micro-batch; gradients are left on the parameters."""
        self._num_rejected_in_a_row = 0
        parts = zip(
            batch.micro_batches,
            batch.split(correction.loss_mask),
            batch.split_optional(correction.weights),
            batch.split_optional(proximal),
            strict=True,
        )
        is_token_mean = self._loss_config.aggregation == "token_mean"
        whole = counts["kept" if is_token_mean else "kept_trajectories"]
        result, currents = _Gradients(0.0, torch.empty(0), 0.0, []), []
        for micro_batch, mask, weight, old in parts:
            current, entropy = forward or self._policy(micro_batch)
            output = self._loss(
                LossInputs(
                    current_logprobs=current,
                    anchor_logprobs=self._anchor_logprobs(micro_batch, current, old),
                    advantages=self._tensor(micro_batch.advantages),
                    loss_mask=mask,
                    offsets=self._tensor(micro_batch.offsets),
                    # FSDP averages gradients over ranks, the loss is a sum over them.
                    denominator=whole / dist.get_world_size(),
                    weights=weight,
                    reference_logprobs=self._reference_logprobs(micro_batch),
                    kl_coefficient=self._config.algorithm.kl.coefficient,
                    kl_estimator=self._config.algorithm.kl.estimator,
                ),
                self._loss_config,
            )
            output.loss.backward()
            result.loss += float(output.loss.detach()) / dist.get_world_size()
            result.entropy_sum += float(entropy.detach()[mask].sum())
            result.loss_metrics.append(output.metrics)
            currents.append(current.detach())
        result.current_logprobs = torch.cat(currents)
        return result

    def _clip_gradients(self) -> float:
        """The norm of all gradients, over all ranks, before it is clipped."""
        norm = torch.nn.utils.clip_grad_norm_(
            self._parameters, self._config.trainer.max_grad_norm, foreach=True
        )
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _check_finite(
        self, step: int, loss: float, grad_norm: float, counts: Mapping[str, float]
    ) -> None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        raise NonFiniteStep(
            f"step {step}: loss {loss}, gradient norm {grad_norm} over {counts['kept']:.0f} "
            f"trained of {counts['all']:.0f} tokens, lr "
            f"{learning_rate(self._config, step=step):g}; both must be finite. Lower "
            "trainer.lr or trainer.max_grad_norm, or set trainer.dtype=float32"
        )

    def _update(self, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._config, step=step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _metrics(
        self,
        batch: Batch,
        correction: Correction,
        fresh: Tensor,
        gradients: _Gradients,
        counts: Mapping[str, float],
    ) -> dict[str, float]:
        """All of a step's metrics but those of single phases, over all ranks."""
        sums = self._sum(
            {
                "loss": gradients.loss,
                "entropy": gradients.entropy_sum,
                "staleness": float(batch.staleness.sum()),
                "masked": float((~fresh).sum()),
            }
        )
        worst = all_reduce_max({"staleness": float(batch.staleness.max())}, device=self._device)
        return {
            "policy_version": float(batch.trainer_version),
            "loss": sums["loss"],
            "entropy": sums["entropy"] / max(1.0, counts["kept"]),
            "staleness/token_mean": sums["staleness"] / counts["all"],
            "staleness/token_max": worst["staleness"],
            "staleness/bound": float(self._config.max_staleness),
            "staleness/masked_tokens": sums["masked"],
            "trainer/tokens": counts["all"],
            "trainer/rejected_batches_in_a_row": float(self._num_rejected_in_a_row),
            **self._loss_metrics(gradients.loss_metrics),
            **self._off_policy_metrics(batch, correction, fresh, gradients.current_logprobs),
        }

    def _assert_corrected(self, batch: Batch, correction: Correction) -> None:
        """A run that trains uncorrected although told to correct would look healthy for long."""
        due = len(batch.behavior_logprobs) if self._correction.is_active else 0
        assert correction.num_compared_tokens == due, (
            f"rollout correction ran on {correction.num_compared_tokens} tokens, due were {due}"
        )
        has_weights = correction.weights is not None
        assert has_weights == (self._correction.weight is not None), (
            f"importance weights: {has_weights}, rule: {self._correction.weight}"
        )

    # Parts of phases.

    def _no_gradients(self, batch: Batch, proximal: Tensor | None) -> _Gradients:
        logprobs = batch.behavior_logprobs if proximal is None else proximal
        return _Gradients(0.0, logprobs, 0.0, [])

    def _anchor_logprobs(
        self, micro_batch: MicroBatch, current: Tensor, proximal: Tensor | None
    ) -> Tensor:
        if self._correction.mode == "bypass":
            return self._tensor(micro_batch.behavior_logprobs)
        return current.detach() if proximal is None else proximal

    def _reference_logprobs(self, micro_batch: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            logprobs: Tensor = self._reference(micro_batch)[0]
        return logprobs

    def _loss_metrics(self, by_micro_batch: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Counts added up, means weighted by trained tokens, over micro-batches and ranks."""
        weight = "trainer/num_trained_tokens"
        sums: dict[str, float] = {}
        for metrics in by_micro_batch:
            for name, value in metrics.items():
                factor = 1.0 if name.startswith("trainer/num_") else metrics[weight]
                sums[name] = sums.get(name, 0.0) + value * factor
        sums = self._sum(sums)
        total = max(1.0, sums.get(weight, 0.0))
        return {
            name: value if name.startswith("trainer/num_") else value / total
            for name, value in sums.items()
        }

    def _off_policy_metrics(
        self, batch: Batch, correction: Correction, fresh: Tensor, current: Tensor
    ) -> dict[str, float]:
        """`correction/*` of the whole batch; quantiles do not add up, so rank 0 gets all tokens."""
        table = self._correction.weight
        lengths = batch.offsets.diff()
        parts = [current, batch.behavior_logprobs, lengths, fresh, correction.loss_mask]
        if correction.weights is not None:
            parts.append(correction.weights)
        everyone = gather_objects([part.cpu() for part in parts])
        if everyone is None:
            return {}
        columns = [torch.cat(column) for column in zip(*everyone, strict=True)]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), columns[2].cumsum(0)])
        return off_policy_metrics(
            columns[0],
            columns[1],
            offsets,
            columns[3],
            weights=columns[5] if correction.weights is not None else None,
            rejection_mask=columns[4],
            level="token" if table is None else table.level,
            bounds=(None, None) if table is None else table.bounds,
        )

    def _sum(self, values: Mapping[str, float]) -> dict[str, float]:
        return all_reduce_sum(values, device=self._device)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def learning_rate(config: Config, *, step: int) -> float:
    """Of step 1, 2, ...: rises linearly over `trainer.warmup_steps`, then stays at `trainer.lr`."""
    warmup = config.trainer.warmup_steps
    return config.trainer.lr * (min(1.0, step / warmup) if warmup else 1.0)
