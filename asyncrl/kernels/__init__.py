"""Importance ratios, rejection, advantages and policy losses on packed arrays: the one face.

    [T] tokens of S trajectories one after another; trajectory i owns offsets[i]:offsets[i + 1]
    loss_mask [T] bool, True = trained; offsets [S + 1] int64, starts at 0 and ends at T

numpy arrays go to C++ (`native`, float32) and come back as numpy arrays: then numpy is all that is
imported. torch tensors come back as torch tensors where they live: corrections of float32 CPU
tensors share memory with C++, everything else, and all that is differentiated, is `reference`, the
definition in torch. Arrays of one call are all numpy or all torch, and torch ones on one device.

Overflow: decisions compare log-ratios with log-bounds; a log-ratio is clamped to +-20 only inside
exp. A token with a non-finite log-prob gets weight 0, mask False, loss 0 and no gradient. What
stands in masked tokens never matters. Sums of the corrections are float64 in token order on CPU.

Errors: ValueError names the array or option with its value; TypeError for a wrong dtype or kind.
Not here: what to do with a batch (that is `asyncrl.trainer`), any collective.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from numpy.typing import NDArray

from asyncrl.kernels import native

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", NDArray[Any], "torch.Tensor")

Level = Literal["token", "sequence", "geometric"]
Bounds = tuple[float | None, float | None]
"""(lower, upper), inclusive; None = no bound."""
Rule = tuple[str, str, float | None, float | None]
"""(statistic, aggregate, lower, upper), see `rejection_mask`."""
AdvantageEstimator = Literal["grpo", "dr_grpo", "rloo"]
KlEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"]


class PolicyLoss(NamedTuple, Generic[Array]):
    """What `policy_loss` returns, one element a token."""

    loss: Array
    """[T] to be minimised."""
    is_clipped: Array
    """[T] bool, True where the clipped term is the larger one (the ratio has no gradient)."""
    is_dual_clipped: Array
    """[T] bool, True where the dual clip caps the loss."""


def importance_weights(
    proximal_logprobs: Array,
    behavior_logprobs: Array,
    offsets: Array,
    loss_mask: Array,
    *,
    level: Level = "token",
    bounds: Bounds = (None, None),
    outside: Literal["truncate", "zero"] = "truncate",
) -> Array:
    """Truncated importance weights [T] float32; 0 where masked or non-finite. No gradient.

    d_t = proximal_t - behavior_t; per trajectory S = sum of d over its N trained, finite tokens.
    w = exp(x) with x = d_t (token), S (sequence) or S / N (geometric), the same for every token of
    a trajectory in the latter two. Outside `bounds` (on w): truncate sets w to the nearer bound
    (truncated importance sampling, IMPALA section 4.1), zero drops it (IcePop). x is clamped to
    +-20 inside exp.
    """
    arrays = _packed(proximal_logprobs, behavior_logprobs, offsets, loss_mask)
    result: Array = _correct(
        "importance_weights", arrays, level=level, bounds=bounds, outside=outside
    )
    return result


def weight_normalizer(
    weights: Array, offsets: Array, loss_mask: Array, *, level: Level
) -> tuple[float, int]:
    """(sum, count) whose quotient, each all-reduced first, is the batch's mean weight.

    token: over trained tokens. sequence, geometric: over trajectories with a trained token, of
    their mean weight. Dividing the truncated weights by it gives them mean 1 (verl's
    `rollout_is_batch_normalize`, which averages after truncation too).
    """
    arrays = {"weights": weights, "offsets": offsets, "loss_mask": loss_mask}
    result: tuple[float, int] = _correct("weight_normalizer", arrays, level=level)
    return result


def rejection_mask(
    proximal_logprobs: Array,
    behavior_logprobs: Array,
    offsets: Array,
    loss_mask: Array,
    *,
    rules: Sequence[Rule],
    veto: float | None = None,
    compat: Literal["verl"] | None = None,
) -> Array:
    """[T] bool, True = kept: trained, finite, and passed by every rule.

    With d = log(proximal / behavior) of a token, statistics are
        ratio exp(d), k1 d, k2 d^2 / 2, k3 exp(d) - 1 - d
    (estimators of Schulman, "Approximating KL divergence"), taken by token, or as sum, mean or max
    over a trajectory's trained tokens, which then stays or goes whole. Bounds are inclusive. Those
    of ratio and k1 are ratios: k1 compares with their logarithms, so that k1 sum bounds the product
    and k1 mean the geometric mean of the trajectory's proximal / behavior. Every rule sees the
    same `loss_mask`.

    veto: rejects a whole trajectory when any of its tokens' proximal / behavior is below it.
    compat "verl": k1 = -d, that is, its bounds apply to behavior / proximal, and d is clamped to
    +-20 before any statistic. verl's documentation describes the meaning without `compat`.
    """
    arrays = _packed(proximal_logprobs, behavior_logprobs, offsets, loss_mask)
    result: Array = _correct("rejection_mask", arrays, rules=list(rules), veto=veto, compat=compat)
    return result


def off_policy_metrics(
    proximal_logprobs: Array,
    behavior_logprobs: Array,
    offsets: Array,
    loss_mask: Array,
    *,
    weights: Array | None = None,
    rejection_mask: Array | None = None,
    level: Level = "token",
    bounds: Bounds = (None, None),
) -> dict[str, float]:
    """Distance of the sampling policy from the proximal one, over trained, finite tokens.

    Keys, each after `correction/`:
        num_nonfinite, num_tokens               trained tokens left out, and counted
        ratio_mean, _max, _min, _p01, _p50, _p99  raw ratio at `level`, before truncation
        ratio_fraction_high, _low               share above / below `bounds`; without a lower one
                                                1 / upper stands for it
        weight_mean, weight_std, ess            of `weights` [T] (None: the raw ratios); ess =
                                                (sum w)^2 / (n sum w^2), in [0, 1]
        kl, k3_kl                               KL(behavior || proximal) a token: mean of -d, and of
                                                exp(d) - 1 - d with d clamped inside exp
        chi2_token, chi2_sequence               mean of exp(d)^2 - 1, of exp(S)^2 - 1
        proximal_ppl, behavior_ppl              mean over trajectories of exp(-mean log-prob)
        proximal_log_ppl, behavior_log_ppl      the same without exp
        log_ppl_diff, _abs_diff, _diff_max, _diff_min, ppl_ratio
                                                of mean behavior - mean proximal a trajectory
        rejected_token_fraction, rejected_sequence_fraction
                                                only with `rejection_mask`; shares of the trained
                                                tokens, and of trajectories that have one
    Without any trained, finite token only the counts and the rejected shares are there.
    """
    arrays: dict[str, Any] = _packed(proximal_logprobs, behavior_logprobs, offsets, loss_mask)
    arrays |= {"weights": weights, "rejection_mask": rejection_mask}
    result: dict[str, float] = _correct("off_policy_metrics", arrays, level=level, bounds=bounds)
    return result


def group_advantages(
    rewards: Array, group_offsets: Array, *, estimator: AdvantageEstimator = "grpo"
) -> Array:
    """Advantages [S] float64 of trajectories against their prompt group.

    rewards: [S] float64, finite. group_offsets: [G + 1] int64; group g owns
    rewards[group_offsets[g]:group_offsets[g + 1]].
        grpo     (r - mean) / (std + 1e-6), unbiased std   (DeepSeekMath section 4.1.2)
        dr_grpo  r - mean                                  (Dr. GRPO)
        rloo     (r - mean) n / (n - 1)                    (RLOO: leave-one-out baseline)
    A group of one has no baseline: its advantage is 0 (verl's GRPO trains it with r).
    """
    arrays = {"rewards": rewards, "group_offsets": group_offsets}
    result: Array = _correct("group_advantages", arrays, estimator=estimator)
    return result


def kl_penalty(
    current_logprobs: Array, reference_logprobs: Array, *, estimator: KlEstimator = "k3"
) -> Array:
    """KL estimate a token [T], differentiable in torch; 0 where a log-prob is not finite.

    x = current - reference: k1 x; k2 x^2 / 2; k3 exp(-x) - 1 + x, with -x clamped to +-20 and the
    result to 10 (verl's `low_var_kl`; beyond a clamp there is no gradient).
    """
    arrays = {"current_logprobs": current_logprobs, "reference_logprobs": reference_logprobs}
    result: Array = _differentiate("kl_penalty", arrays, estimator=estimator)
    return result


def policy_loss(
    current_logprobs: Array,
    anchor_logprobs: Array,
    advantages: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> PolicyLoss[Array]:
    """Clipped surrogate loss a token, differentiable in torch by `current_logprobs`.

    rho = exp(current - old), log-ratio clamped to +-20;
    L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))   (PPO section 3; DAPO clip-higher)
    and where A < 0: L = min(L, -A dual_clip)                    (dual-clip PPO)
    `anchor_logprobs` are the proximal ones (decoupled) or the behavior ones (bypass).
    """
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}: 0 <= low <= 1 and high >= 0")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip={dual_clip} must be > 1, or None for no dual clip")
    arrays = {
        "current_logprobs": current_logprobs,
        "anchor_logprobs": anchor_logprobs,
        "advantages": advantages,
    }
    options = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    return PolicyLoss(*_differentiate("policy_loss", arrays, **options))


def aggregate(
    per_token_loss: Array,
    loss_mask: Array,
    offsets: Array,
    *,
    mode: Aggregation = "token_mean",
    denominator: float,
) -> Any:
    """The scalar to minimise: a 0-d tensor in torch, a float for numpy.

    token_mean                sum of trained losses / denominator (trained tokens)
    sequence_mean_token_mean  sum over trajectories of their mean / denominator (trajectories)
    sequence_mean_token_sum   sum of trained losses / denominator (trajectories)
    `denominator` counts the whole mini-batch over all ranks and micro-batches, so that the split
    does not change the loss; where gradients are averaged over D ranks, pass it divided by D.
    """
    if not denominator > 0:
        raise ValueError(
            f"denominator={denominator} must be > 0; a mini-batch without a trained token has no "
            "loss, skip its step"
        )
    arrays = {"per_token_loss": per_token_loss, "loss_mask": loss_mask, "offsets": offsets}
    return _differentiate("aggregate", arrays, mode=mode, denominator=denominator)


def token_logprobs(
    logits: Array, tokens: Array, *, temperature: float = 1.0
) -> tuple[Array, Array]:
    """(log-probs [T], entropies [T] in nats) of softmax(logits / temperature).

    logits: [T, V]; tokens: [T] int64 in [0, V). Accumulates in float32 at least. In torch both are
    differentiable; rows go through in chunks, and nothing of size [T, V] is kept but `logits` and,
    in the backward pass, its gradient.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be > 0")
    arrays = {"logits": logits, "tokens": tokens}
    result: tuple[Array, Array] = _differentiate("token_logprobs", arrays, temperature=temperature)
    return result


def _packed(
    proximal_logprobs: Array, behavior_logprobs: Array, offsets: Array, loss_mask: Array
) -> dict[str, Array]:
    return {
        "proximal_logprobs": proximal_logprobs,
        "behavior_logprobs": behavior_logprobs,
        "offsets": offsets,
        "loss_mask": loss_mask,
    }


def _is_torch(arrays: dict[str, Any]) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    given = {name: value for name, value in arrays.items() if value is not None}
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    others = [name for name in given if name not in tensors]
    if tensors and others:
        kind = type(given[others[0]]).__name__
        raise TypeError(f"{others[0]} must be a torch tensor like {tensors[0]}, got {kind}")
    return bool(tensors)


def _correct(name: str, arrays: dict[str, Any], **options: Any) -> Any:
    """Without gradient: C++ wherever it can read the arrays."""
    if not _is_torch(arrays):
        return getattr(native, name)(**arrays, **options)
    if native.can_read(arrays):
        return native.through_numpy(getattr(native, name), arrays, options)
    from asyncrl.kernels import reference

    return getattr(reference, name)(**arrays, **options)


def _differentiate(name: str, arrays: dict[str, Any], **options: Any) -> Any:
    """Tensors always take one path, so that values do not depend on who wants a gradient."""
    if not _is_torch(arrays):
        return getattr(native, name)(**arrays, **options)
    from asyncrl.kernels import reference

    return getattr(reference, name)(**arrays, **options)
