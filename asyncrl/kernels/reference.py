"""The definition of every kernel, in torch; other implementations are tested against it.

`asyncrl.kernels` documents the functions and the overflow policy; the signatures are the same, with
every option given. Works on any device and floating dtype. Corrections compute in float64 where the
device has it; losses compute in the promotion of the inputs with float32 and are differentiable:
inputs are selected before exp, never multiplied by a mask, so that no gradient is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
STD_EPSILON = 1e-6
CHUNK_ELEMENTS = 2**24
"""Logits that `token_logprobs` holds in float32 at a time (64 MiB)."""


def importance_weights(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    offsets: Tensor,
    loss_mask: Tensor,
    *,
    level: str,
    bounds: tuple[float | None, float | None],
    outside: str,
) -> Tensor:
    """As `asyncrl.kernels.importance_weights`."""
    lower, upper = _check_bounds("weight", bounds, is_ratio=True)
    _check_choice("outside", outside, ("truncate", "zero"))
    _check_packed(proximal_logprobs, behavior_logprobs, offsets, loss_mask)
    d, is_valid = _log_ratio(proximal_logprobs, behavior_logprobs, loss_mask)
    log_weight = _at_level(d, is_valid, offsets, level)
    weight = _bounded_exp(log_weight)
    truncates = outside == "truncate"
    weight = torch.where(log_weight > _log(upper), upper if truncates else 0.0, weight)
    weight = torch.where(log_weight < _log(lower), lower if truncates else 0.0, weight)
    return torch.where(is_valid, weight, 0.0).to(_at_least_float32(proximal_logprobs))


def weight_normalizer(
    weights: Tensor, offsets: Tensor, loss_mask: Tensor, *, level: str
) -> tuple[float, int]:
    """As `asyncrl.kernels.weight_normalizer`."""
    _check_choice("level", level, ("token", "sequence", "geometric"))
    _check_size("loss_mask", loss_mask, "weights", weights)
    _check_offsets("offsets", offsets, weights.shape[0], "T")
    selected = torch.where(loss_mask, weights, 0.0).to(_accumulator(weights))
    if level == "token":
        return float(selected.sum()), int(loss_mask.sum())
    num_tokens = _segment_sum(loss_mask.to(selected), offsets)
    means = _segment_sum(selected, offsets) / num_tokens.clamp(min=1.0)
    return float(means.sum()), int((num_tokens > 0).sum())


def rejection_mask(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    offsets: Tensor,
    loss_mask: Tensor,
    *,
    rules: Sequence[tuple[str, str, float | None, float | None]],
    veto: float | None,
    compat: str | None,
) -> Tensor:
    """As `asyncrl.kernels.rejection_mask`."""
    if compat is not None:
        _check_choice("compat", compat, ("verl",))
    veto_ratio, _ = _check_bounds("veto", (veto, None), is_ratio=True)
    _check_packed(proximal_logprobs, behavior_logprobs, offsets, loss_mask)
    d, is_valid = _log_ratio(proximal_logprobs, behavior_logprobs, loss_mask)
    vetoed = _segment_sum((is_valid & (d < _log(veto_ratio))).to(d), offsets) > 0
    kept = is_valid & ~_spread(vetoed, offsets)
    for rule in rules:
        kept = kept & _passes(d, is_valid, offsets, rule, is_verl=compat == "verl")
    return kept


def _passes(
    d: Tensor,
    is_valid: Tensor,
    offsets: Tensor,
    rule: tuple[str, str, float | None, float | None],
    *,
    is_verl: bool,
) -> Tensor:
    """[T] bool: whether a rule keeps the token."""
    statistic, aggregate_name, *bounds = rule
    _check_choice("statistic", statistic, ("ratio", "k1", "k2", "k3"))
    _check_choice("aggregate", aggregate_name, ("token", "sum", "mean", "max"))
    is_ratio = statistic in ("ratio", "k1")
    lower, upper = _check_bounds(statistic, (bounds[0], bounds[1]), is_ratio=is_ratio)
    in_log_space = statistic == "k1" or (is_ratio and aggregate_name in ("token", "max"))
    if in_log_space:
        lower, upper = _log(lower), _log(upper)
    if is_verl:
        d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    x = {
        "ratio": lambda: d if in_log_space else _bounded_exp(d),
        "k1": lambda: -d if is_verl else d,
        "k2": lambda: d * d / 2,
        "k3": lambda: _k3(d),
    }[statistic]()
    if aggregate_name != "token":
        x = _spread(_aggregate_statistic(x, is_valid, offsets, aggregate_name), offsets)
    return (lower <= x) & (x <= upper)


def _aggregate_statistic(x: Tensor, is_valid: Tensor, offsets: Tensor, name: str) -> Tensor:
    if name == "max":
        lowest = x.new_full((offsets.shape[0] - 1,), -math.inf)
        selected = torch.where(is_valid, x, -math.inf)
        return lowest.scatter_reduce(0, _segment_ids(offsets), selected, "amax")
    total = _segment_sum(torch.where(is_valid, x, 0.0), offsets)
    if name == "sum":
        return total
    return total / _segment_sum(is_valid.to(x), offsets).clamp(min=1.0)


def off_policy_metrics(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    offsets: Tensor,
    loss_mask: Tensor,
    *,
    weights: Tensor | None,
    rejection_mask: Tensor | None,
    level: str,
    bounds: tuple[float | None, float | None],
) -> dict[str, float]:
    """As `asyncrl.kernels.off_policy_metrics`."""
    limits = _check_bounds("ratio", bounds, is_ratio=True)
    _check_packed(proximal_logprobs, behavior_logprobs, offsets, loss_mask)
    d, is_valid = _log_ratio(proximal_logprobs, behavior_logprobs, loss_mask)
    log_weight = _at_level(d, is_valid, offsets, level)
    if weights is None:
        weights = _bounded_exp(log_weight)
    _check_size("weights", weights, "proximal_logprobs", proximal_logprobs)
    out: dict[str, Any] = {
        "num_nonfinite": (loss_mask & ~is_valid).sum(),
        "num_tokens": is_valid.sum(),
    }
    if rejection_mask is not None:
        _check_size("rejection_mask", rejection_mask, "proximal_logprobs", proximal_logprobs)
        out |= _rejected_fractions(rejection_mask, loss_mask, offsets, d.dtype)
    if out["num_tokens"] > 0:
        has_tokens = _segment_sum(is_valid.to(d), offsets) > 0
        last = (offsets[1:] - 1)[has_tokens]
        units = log_weight[is_valid] if level == "token" else log_weight[last]
        out |= _ratio_metrics(units, limits)
        out |= _weight_metrics(weights.to(d.dtype)[is_valid])
        out |= _divergence_metrics(d[is_valid])
        per_token = [
            torch.where(is_valid, x.to(d.dtype), 0.0)
            for x in (d, proximal_logprobs, behavior_logprobs)
        ]
        sums = [_segment_sum(x, offsets)[has_tokens] for x in per_token]
        out |= _sequence_metrics(sums, _segment_sum(is_valid.to(d), offsets)[has_tokens])
    return {f"correction/{name}": float(value) for name, value in out.items()}


def _rejected_fractions(
    kept: Tensor, loss_mask: Tensor, offsets: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    rejected = (loss_mask & ~kept).to(dtype)
    num_trained = _segment_sum(loss_mask.to(dtype), offsets)
    has_rejected = _segment_sum(rejected, offsets) > 0
    return {
        "rejected_token_fraction": rejected.sum() / num_trained.sum().clamp(min=1.0),
        "rejected_sequence_fraction": has_rejected.sum() / (num_trained > 0).sum().clamp(min=1),
    }


def _ratio_metrics(log_ratio: Tensor, limits: tuple[float, float]) -> dict[str, Tensor]:
    lower, upper = limits
    ratio = _bounded_exp(log_ratio).sort().values
    quantiles = {f"ratio_p{q:02d}": _quantile(ratio, q / 100) for q in (1, 50, 99)}
    log_lower = _log(lower) if lower > 0 else -_log(upper)
    return quantiles | {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio[-1],
        "ratio_min": ratio[0],
        "ratio_fraction_high": (log_ratio > _log(upper)).to(ratio).mean(),
        "ratio_fraction_low": (log_ratio < log_lower).to(ratio).mean(),
    }


def _quantile(ordered: Tensor, q: float) -> Tensor:
    """Linear interpolation; `torch.quantile` refuses more than 16M elements."""
    position = q * (ordered.shape[0] - 1)
    below = int(position)
    above = min(below + 1, ordered.shape[0] - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _weight_metrics(weights: Tensor) -> dict[str, Any]:
    squares = weights.square().mean()
    mean = weights.mean()
    return {
        "weight_mean": mean,
        "weight_std": (squares - mean.square()).clamp(min=0.0).sqrt(),
        "ess": mean.square() / squares if squares > 0 else 0.0,
    }


def _divergence_metrics(d: Tensor) -> dict[str, Tensor]:
    return {
        "kl": -d.mean(),
        "k3_kl": _k3(d).mean(),
        "chi2_token": _bounded_exp(d).square().mean() - 1.0,
    }


def _sequence_metrics(sums: list[Tensor], num_tokens: Tensor) -> dict[str, Tensor]:
    log_ratio, proximal, behavior = sums[0], sums[1] / num_tokens, sums[2] / num_tokens
    diff = behavior - proximal
    return {
        "chi2_sequence": _bounded_exp(log_ratio).square().mean() - 1.0,
        "proximal_ppl": _bounded_exp(-proximal).mean(),
        "behavior_ppl": _bounded_exp(-behavior).mean(),
        "proximal_log_ppl": -proximal.mean(),
        "behavior_log_ppl": -behavior.mean(),
        "log_ppl_diff": diff.mean(),
        "log_ppl_abs_diff": diff.abs().mean(),
        "log_ppl_diff_max": diff.max(),
        "log_ppl_diff_min": diff.min(),
        "ppl_ratio": _bounded_exp(diff).mean(),
    }


def group_advantages(rewards: Tensor, group_offsets: Tensor, *, estimator: str) -> Tensor:
    """As `asyncrl.kernels.group_advantages`; in the rewards' dtype, float32 at least."""
    _check_choice("estimator", estimator, ("grpo", "dr_grpo", "rloo"))
    _check_offsets("group_offsets", group_offsets, rewards.shape[0], "S")
    if not bool(torch.isfinite(rewards).all()):
        index = int((~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(f"rewards[{index}]={float(rewards[index])} is not finite; it must be")
    r = rewards.to(_accumulator(rewards))
    n = group_offsets.diff().to(r)
    centred = r - _spread(_segment_sum(r, group_offsets) / n.clamp(min=1.0), group_offsets)
    scale = torch.ones_like(n)
    if estimator == "grpo":
        variance = _segment_sum(centred.square(), group_offsets) / (n - 1.0).clamp(min=1.0)
        scale = 1.0 / (variance.sqrt() + STD_EPSILON)
    elif estimator == "rloo":
        scale = n / (n - 1.0).clamp(min=1.0)
    scale = torch.where(n > 1.0, scale, 0.0)
    return (centred * _spread(scale, group_offsets)).to(_at_least_float32(rewards))


def kl_penalty(current_logprobs: Tensor, reference_logprobs: Tensor, *, estimator: str) -> Tensor:
    """As `asyncrl.kernels.kl_penalty`."""
    _check_choice("estimator", estimator, ("k1", "k2", "k3"))
    _check_size("reference_logprobs", reference_logprobs, "current_logprobs", current_logprobs)
    x, _ = _finite_difference(current_logprobs, reference_logprobs)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    y = (-x).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(y) - y).clamp(max=MAX_K3)


def policy_loss(
    current_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `asyncrl.kernels.policy_loss`: (loss, is_clipped, is_dual_clipped)."""
    _check_size("anchor_logprobs", anchor_logprobs, "current_logprobs", current_logprobs)
    _check_size("advantages", advantages, "current_logprobs", current_logprobs)
    log_ratio, is_finite = _finite_difference(current_logprobs, anchor_logprobs)
    ratio = _bounded_exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped = clipped > unclipped
    loss = torch.where(is_clipped, clipped, unclipped)
    is_dual_clipped = torch.zeros_like(is_clipped)
    if dual_clip is not None:
        cap = -advantages * dual_clip
        is_dual_clipped = (advantages < 0.0) & (loss > cap)
        loss = torch.where(is_dual_clipped, cap, loss)
    loss = torch.where(is_finite, loss, 0.0)
    return loss, is_clipped & is_finite, is_dual_clipped & is_finite


def aggregate(
    per_token_loss: Tensor, loss_mask: Tensor, offsets: Tensor, *, mode: str, denominator: float
) -> Tensor:
    """As `asyncrl.kernels.aggregate`."""
    modes = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")
    _check_choice("mode", mode, modes)
    _check_size("loss_mask", loss_mask, "per_token_loss", per_token_loss)
    _check_offsets("offsets", offsets, per_token_loss.shape[0], "T")
    loss = torch.where(loss_mask, per_token_loss, 0.0)
    if mode == "sequence_mean_token_mean":
        num_tokens = _segment_sum(loss_mask.to(loss), offsets).clamp(min=1.0)
        loss = loss / _spread(num_tokens, offsets)
    return (loss.sum(dtype=_accumulator(loss)) / denominator).to(loss.dtype)


def token_logprobs(logits: Tensor, tokens: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """As `asyncrl.kernels.token_logprobs`: log p[token] and -sum p log p of p = softmax(z)."""
    if logits.ndim != 2:
        raise ValueError(f"logits must be [T, V], got shape {tuple(logits.shape)}")
    if tokens.shape != logits.shape[:1]:
        raise ValueError(
            f"tokens must be [T] with T={logits.shape[0]} (rows of logits), "
            f"got shape {tuple(tokens.shape)}"
        )
    is_outside = (tokens < 0) | (tokens >= logits.shape[1])
    # A device would answer with an assertion that kills the process; asking it first costs a wait.
    if tokens.device.type == "cpu" and bool(is_outside.any()):
        index = int(is_outside.nonzero()[0])
        raise ValueError(
            f"tokens[{index}]={int(tokens[index])} is outside the vocabulary [0, {logits.shape[1]})"
        )
    results: tuple[Tensor, Tensor] = _TokenLogprobs.apply(logits, tokens, temperature)  # type: ignore[no-untyped-call]
    return results


class _TokenLogprobs(torch.autograd.Function):
    """Keeps logits and [T] results only; the softmax is computed again in the backward pass.

    With p = softmax(z), H the entropy: d logp / dz_j = [j = token] - p_j and
    d H / dz_j = -p_j log p_j - p_j H.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Any:
        dtype = _at_least_float32(logits)
        logprobs = torch.empty(tokens.shape, dtype=dtype, device=logits.device)
        entropy = torch.empty_like(logprobs)
        for rows in _row_chunks(logits):
            z = logits[rows].to(dtype) / temperature
            chosen = z.gather(1, tokens[rows, None]).squeeze(1)
            logprobs[rows] = chosen - z.logsumexp(1)
            entropy[rows] = torch.special.entr(z.softmax(1)).sum(1)
        ctx.save_for_backward(logits, tokens, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        logits, tokens, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            p = (logits[rows].to(entropy.dtype) / ctx.temperature).softmax(1)
            total = torch.zeros_like(p)
            if grad_entropy is not None:
                slope = torch.special.entr(p) - p * entropy[rows, None]
                total += grad_entropy[rows, None] * slope
            if grad_logprobs is not None:
                g = grad_logprobs[rows, None]
                total -= g * p
                total.scatter_add_(1, tokens[rows, None], g)
            grad[rows] = (total / ctx.temperature).to(grad.dtype)
        return grad, None, None


def _row_chunks(logits: Tensor) -> list[slice]:
    num_rows = max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(i, i + num_rows) for i in range(0, logits.shape[0], num_rows)]


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _accumulator(x: Tensor) -> torch.dtype:
    """float64, but on devices that do not have it."""
    return torch.float32 if x.device.type in ("npu", "mps") else torch.float64


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _bounded_exp(x: Tensor) -> Tensor:
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _k3(d: Tensor) -> Tensor:
    """exp(d) - 1 - d, never below 0 nor infinite."""
    return torch.expm1(d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - d


def _finite_difference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a - b and where both are finite; 0 without gradient elsewhere."""
    dtype = torch.promote_types(_at_least_float32(a), b.dtype)
    is_finite = torch.isfinite(a) & torch.isfinite(b)
    difference = torch.where(is_finite, a.to(dtype), 0.0) - torch.where(is_finite, b.to(dtype), 0.0)
    return difference, is_finite


def _log_ratio(proximal: Tensor, behavior: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(d [T], 0 where invalid; is_valid [T] = trained and finite)."""
    dtype = _accumulator(proximal)
    d, is_finite = _finite_difference(proximal.detach().to(dtype), behavior.detach().to(dtype))
    is_valid = is_finite & loss_mask
    return torch.where(is_valid, d, 0.0), is_valid


def _at_level(d: Tensor, is_valid: Tensor, offsets: Tensor, level: str) -> Tensor:
    """[T] log-weights: each token's own, or its trajectory's sum or mean."""
    _check_choice("level", level, ("token", "sequence", "geometric"))
    if level == "token":
        return d
    x = _segment_sum(d, offsets)
    if level == "geometric":
        x = x / _segment_sum(is_valid.to(d), offsets).clamp(min=1.0)
    return _spread(x, offsets)


def _segment_ids(offsets: Tensor) -> Tensor:
    """[T] index of the segment that each element belongs to."""
    segments = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return torch.repeat_interleave(segments, offsets.diff())


def _segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """[S] sums of [T] values."""
    zeros = values.new_zeros(offsets.shape[0] - 1)
    return zeros.index_add(0, _segment_ids(offsets), values)


def _spread(per_segment: Tensor, offsets: Tensor) -> Tensor:
    """[T]: each element gets the value of its segment."""
    return torch.repeat_interleave(per_segment, offsets.diff())


def _check_choice(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{name}={value!r} is unknown; legal: {', '.join(legal)}")


def _check_bounds(
    name: str, bounds: tuple[float | None, float | None], *, is_ratio: bool
) -> tuple[float, float]:
    """Bounds with 0 and infinity for None."""
    for bound in bounds:
        if bound is not None and not (
            math.isfinite(bound) and (bound > 0 if is_ratio else bound >= 0)
        ):
            legal = "> 0" if is_ratio else ">= 0"
            raise ValueError(
                f"{name} bound {bound} is not legal: finite and {legal}, or None for no bound"
            )
    lower = 0.0 if bounds[0] is None else bounds[0]
    upper = math.inf if bounds[1] is None else bounds[1]
    if lower > upper:
        raise ValueError(f"{name} bounds ({lower}, {upper}) are in the wrong order: lower first")
    return lower, upper


def _check_packed(proximal: Tensor, behavior: Tensor, offsets: Tensor, loss_mask: Tensor) -> None:
    _check_size("behavior_logprobs", behavior, "proximal_logprobs", proximal)
    _check_size("loss_mask", loss_mask, "proximal_logprobs", proximal)
    if loss_mask.dtype != torch.bool:
        raise TypeError(f"loss_mask must be bool, got {loss_mask.dtype}; convert it with .bool()")
    _check_offsets("offsets", offsets, proximal.shape[0], "T")


def _check_size(name: str, value: Tensor, like: str, other: Tensor) -> None:
    if value.ndim != 1:
        raise ValueError(f"{name} must have 1 dimension(s), got {value.ndim}")
    if value.shape != other.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, {like} has {tuple(other.shape)}; "
            "they must be equal"
        )
    if value.device != other.device:
        raise ValueError(f"{name} is on {value.device}, {like} on {other.device}; move one of them")


def _check_offsets(name: str, offsets: Tensor, end: int, symbol: str) -> None:
    if offsets.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {offsets.dtype}; convert it with .long()")
    if offsets.ndim != 1 or offsets.shape[0] == 0 or int(offsets[0]) != 0:
        raise ValueError(f"{name} must be 1-dimensional and start at 0, got {offsets[:1].tolist()}")
    if bool((offsets.diff() < 0).any()):
        raise ValueError(f"{name} must not decrease, got {offsets.tolist()}")
    if int(offsets[-1]) != end:
        raise ValueError(f"{name} must end at {symbol}={end}, got {int(offsets[-1])}")
