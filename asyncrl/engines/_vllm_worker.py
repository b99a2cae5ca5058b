"""What runs in vLLM's own worker processes: loading new weights, and ending with their owner."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class WorkerExtension:
    """Methods that vLLM adds to each of its worker processes; called through `collective_rpc`."""

    model_runner: Any
    vllm_config: Any

    def asyncrl_follow(self, owner_pid: int) -> None:
        """Ends this worker and its engine core once the process `owner_pid` is gone."""
        # vLLM's engine core outlives a killed parent, and with it gigabytes of memory.
        threading.Thread(target=_end_with, args=(owner_pid,), daemon=True).start()

    def asyncrl_load(self, folder: str) -> None:
        """Loads the safetensors in `folder`; ValueError naming a parameter that did not arrive."""
        import torch
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.model
        files = sorted(Path(folder).glob("*.safetensors"))
        weights = {name: t for file in files for name, t in load_file(file).items()}
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            # Layerwise: vLLM packs weights for the CPU's kernels, and must pack the new ones too.
            initialize_layerwise_reload(model)
            expected = {name for name, _ in model.named_parameters()}
            loaded = model.load_weights(iter(weights.items()))
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if self.vllm_config.model_config.hf_text_config.tie_word_embeddings:
                expected.discard("lm_head.weight")
                # A tied head has no weights in the file, so the reload leaves its packed copy be.
                model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        if missing := expected - set(loaded):
            raise ValueError(f"{folder} holds no weights for {sorted(missing)[:3]} …")
        _check_same(dict(model.named_parameters()), weights, folder)


def _check_same(
    held: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], folder: str
) -> None:
    """Raises ValueError unless parameters that vLLM neither fuses, packs nor shards equal the file.

    Those are norms and embeddings: some in every layer. An embedding may be padded at its end.
    """
    import torch

    num_compared = 0
    for name, file_tensor in weights.items():
        if name not in held or held[name].dim() != file_tensor.dim():
            continue
        ours = held[name].detach()[: len(file_tensor)]
        if "norm" not in name and "embed" not in name or ours.shape != file_tensor.shape:
            continue
        if not torch.equal(ours, file_tensor.to(ours.dtype).to(ours.device)):
            raise ValueError(f"after loading {folder}, the engine's {name} differs from the file's")
        num_compared += 1
    if num_compared == 0:
        raise ValueError(f"{folder}: no norm or embedding of the model is in its files: {held}")


def _end_with(owner_pid: int) -> None:
    """Waits, without a deadline, for `owner_pid` to end; kills the engine core, then itself."""
    import select
    import signal

    parent = os.getppid()
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(owner_pid)], [], [])
    if parent not in (owner_pid, 1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os._exit(1)
