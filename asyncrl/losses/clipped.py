"""PPO's clipped surrogate with clip-higher, dual clip, importance weights and a KL penalty.

    rho_t  = exp(current_t - old_t)
    L_t    = max(-A_t rho_t, -A_t clip(rho_t, 1 - clip_low, 1 + clip_high))
    L_t    = min(L_t, -A_t dual_clip)               where A_t < 0
    loss   = aggregate(w_t L_t) + kl_coefficient aggregate(KL_t)

old = proximal and w = proximal / behavior (decoupled PPO), or old = behavior and w = 1 (bypass).
Both sums run over trained tokens (`loss_mask`) whose log-probs are finite; the rest are counted.
Log-ratios are clamped to +-20 inside exp. With one step a batch rho = 1, and this is GRPO's
policy gradient. Sources: PPO section 3, DAPO section 3.1, dual-clip PPO, decoupled PPO (AReaL).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

from asyncrl.kernels import Aggregation, aggregate, kl_penalty, policy_loss
from asyncrl.losses import LossInputs, LossOutput

if TYPE_CHECKING:
    from torch import Tensor


class Config(BaseModel, frozen=True, extra="forbid"):
    """Settings of the clipped loss."""

    type: Literal["clipped"] = "clipped"
    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0.0)
    """The ratio is clipped from above at 1 + clip_high; above clip_low it is DAPO's clip-higher."""
    dual_clip: float | None = Field(default=3.0, gt=1.0)
    """Largest ratio that counts against a negative advantage; null = no limit."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number, see `asyncrl.kernels.aggregate`."""


def loss(inputs: LossInputs, config: Config) -> LossOutput:
    """The micro-batch's loss, differentiable by `current_logprobs`, and what was clipped in it."""
    trained = (
        inputs.loss_mask & inputs.current_logprobs.isfinite() & inputs.anchor_logprobs.isfinite()
    )
    # Selected before any arithmetic: a NaN in a masked token must not reach the backward pass.
    current = inputs.current_logprobs.where(trained, 0.0)
    old = inputs.anchor_logprobs.where(trained, 0.0)
    terms = policy_loss(
        current,
        old,
        inputs.advantages.where(trained, 0.0),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    per_token = terms.loss
    if inputs.weights is not None:
        per_token = per_token * inputs.weights.where(trained, 0.0)
    total = _aggregate(per_token, trained, inputs, config)
    num_trained = int(trained.sum())
    metrics = {
        "trainer/num_trained_tokens": float(num_trained),
        "trainer/num_nonfinite": float((inputs.loss_mask & ~trained).sum()),
        "trainer/clip_fraction": _mean(terms.is_clipped, num_trained),
        "trainer/dual_clip_fraction": _mean(terms.is_dual_clipped, num_trained),
        "trainer/anchor_kl": _mean(old - current, num_trained),
    }
    if inputs.reference_logprobs is not None:
        reference = inputs.reference_logprobs.where(trained, 0.0)
        penalty = kl_penalty(current, reference, estimator=inputs.kl_estimator)
        total = total + inputs.kl_coefficient * _aggregate(penalty, trained, inputs, config)
        metrics["trainer/reference_kl"] = _mean(penalty, num_trained)
    return LossOutput(total, metrics)


def _aggregate(per_token: Tensor, trained: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    result: Tensor = aggregate(
        per_token,
        trained,
        inputs.offsets,
        mode=config.aggregation,
        denominator=inputs.denominator,
    )
    return result


def _mean(values: Tensor, num_trained: int) -> float:
    """Mean over trained tokens of values that are 0 elsewhere."""
    return float(values.detach().sum()) / max(1, num_trained)
