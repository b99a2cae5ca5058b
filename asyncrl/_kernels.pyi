"""C++ kernels for numpy arrays; `asyncrl.kernels` documents them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float32]
_Offsets = NDArray[np.int64]
_Mask = NDArray[np.bool_]
_Bounds = tuple[float | None, float | None]

def importance_weights(
    proximal_logprobs: _Floats,
    behavior_logprobs: _Floats,
    offsets: _Offsets,
    loss_mask: _Mask,
    *,
    level: str,
    bounds: _Bounds,
    outside: str,
) -> _Floats: ...
def weight_normalizer(
    weights: _Floats, offsets: _Offsets, loss_mask: _Mask, *, level: str
) -> tuple[float, int]: ...
def rejection_mask(
    proximal_logprobs: _Floats,
    behavior_logprobs: _Floats,
    offsets: _Offsets,
    loss_mask: _Mask,
    *,
    rules: Sequence[tuple[str, str, float | None, float | None]],
    veto: float | None,
    compat: str | None,
) -> _Mask: ...
def off_policy_metrics(
    proximal_logprobs: _Floats,
    behavior_logprobs: _Floats,
    offsets: _Offsets,
    loss_mask: _Mask,
    *,
    weights: _Floats,
    rejection_mask: _Mask | None,
    level: str,
    bounds: _Bounds,
) -> dict[str, float]: ...
def group_advantages(
    rewards: NDArray[np.float64], group_offsets: _Offsets, *, estimator: str
) -> NDArray[np.float64]: ...
def kl_penalty(
    current_logprobs: _Floats, reference_logprobs: _Floats, *, estimator: str
) -> _Floats: ...
def policy_loss(
    current_logprobs: _Floats,
    anchor_logprobs: _Floats,
    advantages: _Floats,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[_Floats, _Mask, _Mask]: ...
def aggregate(
    per_token_loss: _Floats,
    loss_mask: _Mask,
    offsets: _Offsets,
    *,
    mode: str,
    denominator: float,
) -> float: ...
def token_logprobs(
    logits: _Floats, tokens: NDArray[np.int64], *, temperature: float
) -> tuple[_Floats, _Floats]: ...
