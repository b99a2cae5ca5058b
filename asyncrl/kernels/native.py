"""The C++ kernels for numpy arrays, and the bridge that lets CPU tensors share memory with them.

`asyncrl.kernels` documents the functions. Arrays are float32 (rewards: float64), offsets and tokens
int64, masks bool; nothing is converted silently. No torch import here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl import _kernels
from asyncrl._kernels import (
    aggregate,
    group_advantages,
    importance_weights,
    kl_penalty,
    policy_loss,
    rejection_mask,
    token_logprobs,
    weight_normalizer,
)

__all__ = [
    "aggregate",
    "can_read",
    "group_advantages",
    "importance_weights",
    "kl_penalty",
    "off_policy_metrics",
    "policy_loss",
    "rejection_mask",
    "through_numpy",
    "token_logprobs",
    "weight_normalizer",
]


def off_policy_metrics(
    proximal_logprobs: NDArray[np.float32],
    behavior_logprobs: NDArray[np.float32],
    offsets: NDArray[np.int64],
    loss_mask: NDArray[np.bool_],
    *,
    weights: NDArray[np.float32] | None,
    rejection_mask: NDArray[np.bool_] | None,
    level: str,
    bounds: tuple[float | None, float | None],
) -> dict[str, float]:
    """As `asyncrl.kernels.off_policy_metrics`."""
    packed = (proximal_logprobs, behavior_logprobs, offsets, loss_mask)
    if weights is None:
        weights = importance_weights(*packed, level=level, bounds=(None, None), outside="truncate")
    return _kernels.off_policy_metrics(
        *packed, weights=weights, rejection_mask=rejection_mask, level=level, bounds=bounds
    )


def can_read(tensors: Mapping[str, Any]) -> bool:
    """Whether C++ can read these torch tensors in place: on the CPU, in the kernels' float type."""
    return all(
        tensor is None
        or (
            tensor.device.type == "cpu"
            and (
                not tensor.dtype.is_floating_point
                or tensor.dtype.itemsize == (8 if name == "rewards" else 4)
            )
        )
        for name, tensor in tensors.items()
    )


def through_numpy(
    function: Callable[..., Any], tensors: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """Calls `function` on views of CPU tensors; an array result comes back as a tensor."""
    arrays = {
        name: None if tensor is None else tensor.detach().contiguous().numpy()
        for name, tensor in tensors.items()
    }
    result = function(**arrays, **options)
    if not isinstance(result, np.ndarray):
        return result
    import torch

    return torch.from_numpy(result)
