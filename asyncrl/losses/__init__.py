"""Policy losses, one file each: what a loss plug-in is given and what it returns.

A plug-in module offers `Config` (pydantic, `type` names the module) and
`loss(inputs: LossInputs, config: Config) -> LossOutput`. It is called once a micro-batch, on tokens
of whole trajectories; results of all micro-batches and ranks add up to the mini-batch's loss. It
neither moves tensors nor enters collectives, and a masked token has no effect on the loss or its
gradient, whatever stands in it. torch is imported by those who call a loss, not by this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.kernels import KlEstimator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch of T packed tokens from S trajectories, all on one device."""

    current_logprobs: Tensor
    """[T] floating, carries the gradient."""
    anchor_logprobs: Tensor
    """[T] denominator of the clipped ratio: proximal log-probs (decoupled) or behavior (bypass)."""
    advantages: Tensor
    """[T] floating."""
    loss_mask: Tensor
    """[T] bool, True = trained; rejected tokens are already False."""
    offsets: Tensor
    """[S + 1] int64; trajectory i owns tokens offsets[i]:offsets[i + 1]."""
    denominator: float
    """> 0. What the aggregation divides by, counted over the whole mini-batch and all ranks:
    trained tokens for token_mean, trajectories for the others; divided by D where gradients are
    averaged over D ranks."""
    weights: Tensor | None = None
    """[T] floating importance weights proximal / behavior, without gradient; None = 1."""
    reference_logprobs: Tensor | None = None
    """[T] log-probs of the policy that the KL penalty holds on to; None = no penalty."""
    kl_coefficient: float = 0.0
    """>= 0, factor of the KL penalty."""
    kl_estimator: KlEstimator = "k3"


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the loss."""

    loss: Tensor
    """[] scalar; sum over micro-batches and ranks (before averaging gradients) is the whole."""
    metrics: dict[str, float]
    """`trainer/...` names. Means over this call's trained tokens, weighted by
    `trainer/num_trained_tokens` when combined; `trainer/num_...` are counts that add up."""
