"""Data parallelism: process group, FSDP2 sharding, reductions of metrics, weight export.

One code path for one rank and many. Every function marked *collective* is entered by all ranks in
the same order. Not here: which data a rank trains on (`batcher`), the loss (`step`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asyncrl.trainer.model import Policy

WEIGHTS_FILE = "model.safetensors"


def init_process_group(
    rendezvous: str, *, rank: int, num_ranks: int, backend: str, timeout_s: float
) -> None:
    """Joins all ranks at `rendezvous` ("tcp://host:port"). Collective; waits at most `timeout_s`.

    `timeout_s` also bounds every later collective.
    """
    dist.init_process_group(
        backend,
        init_method=rendezvous,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def shard(policy: Policy, *, device: torch.device, dtype: torch.dtype) -> None:
    """Shards every decoder layer and the rest over all ranks, in place. Collective.

    Weights stay float32 (a small learning rate vanishes in bfloat16); `dtype` is what forward and
    backward compute in.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in policy.model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)


def all_reduce_sum(values: Mapping[str, float], *, device: torch.device) -> dict[str, float]:
    """Each value summed over ranks; all ranks pass the same names. Collective."""
    return _all_reduce(values, dist.ReduceOp.SUM, device)


def all_reduce_max(values: Mapping[str, float], *, device: torch.device) -> dict[str, float]:
    """Each value's maximum over ranks; all ranks pass the same names. Collective."""
    return _all_reduce(values, dist.ReduceOp.MAX, device)


def _all_reduce(values: Mapping[str, float], op: Any, device: torch.device) -> dict[str, float]:
    # Sorted: ranks must agree on the order of values, whatever order they were collected in.
    names = sorted(values)
    if dist.get_world_size() == 1 or not names:
        return {name: float(values[name]) for name in names}
    packed = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(packed, op=op)
    return dict(zip(names, packed.tolist(), strict=True))


def broadcast_object(value: Any) -> Any:
    """Rank 0's picklable value, on every rank. Collective."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: Any) -> list[Any] | None:
    """Every rank's picklable value, in rank order, on rank 0; None elsewhere. Collective."""
    if dist.get_world_size() == 1:
        return [value]
    gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, gathered, dst=0)
    return gathered


def export_weights(model: nn.Module, folder: Path, *, dtype: torch.dtype) -> None:
    """Writes all weights, in `dtype`, to `folder`/model.safetensors on rank 0. Collective.

    Hugging Face names; a tied weight once. The file appears complete or not at all.
    """
    is_writer = dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in _unique_tensors(model):
            full = _full(tensor)
            if is_writer:
                is_trained = full.is_floating_point()
                tensors[name] = full.to("cpu", dtype if is_trained else full.dtype).contiguous()
    if is_writer:
        _write(tensors, folder)


def save_pretrained_folder(
    model: Any, model_folder: Path, folder: Path, *, dtype: torch.dtype
) -> None:
    """Writes a folder that transformers and vLLM load: weights, config, tokenizer. Collective.

    Config, generation config and tokenizer are those of `model_folder`.
    """
    export_weights(model, folder, dtype=dtype)
    if dist.get_rank() != 0:
        return
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model_folder)
    config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)


def _unique_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What the state dict holds, each tensor under its first name only."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _full(tensor: Tensor) -> Tensor:
    """The whole tensor; with one rank that is its shard, and nothing is copied."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if dist.get_world_size() == 1 else tensor.full_tensor()


def _write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{WEIGHTS_FILE}.part"
    save_file(dict(tensors), part, metadata={"format": "pt"})
    os.replace(part, folder / WEIGHTS_FILE)
