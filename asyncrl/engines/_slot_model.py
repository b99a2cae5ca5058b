"""The torch half of the built-in engine: a causal language model with a fixed batch of slots.

Knows tensors and weights; knows no request, queue or thread. A decode step always runs all
`num_slots` rows and attends to all `max_model_len` positions, so a row's result is a function of
its own tokens alone, bit for bit. Idle rows compute what nobody reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.engines._kv_cache import SlotCache

_LENGTH_MULTIPLE = 16
"""Rows of the cache and the mask then start on whole cache lines, whatever max_model_len is."""
_RECOMPUTE_TOKENS = 8192
"""Padded tokens of one forward pass of `prefill_each`; bounds its memory."""
_ATTENTION_TYPES = {"full_attention", "sliding_attention"}


class SlotModel:
    """A causal language model, its weights, and the keys and values of `num_slots` sequences."""

    def __init__(self, folder: Path, *, num_slots: int, max_model_len: int, device: str) -> None:
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"no config.json in {folder}; model.path takes a Hugging Face folder"
            )
        self._device = torch.device(device)
        # Eager: the fused CPU attention gives other bits on a second thread than on the first.
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation="eager", local_files_only=True
        )
        self._model.eval().requires_grad_(False).to(self._device)
        config = self._model.config.get_text_config()
        _check_attention(config, max_model_len=max_model_len)
        self.vocab_size: int = self._model.get_input_embeddings().num_embeddings
        self.stop_tokens = _stop_tokens(self._model)
        self._cache_argument = _cache_argument(self._model)
        length = -(-max_model_len // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        self._cache = SlotCache(
            config.num_hidden_layers, num_slots=num_slots, max_length=length, device=self._device
        )
        self._key_positions = torch.arange(length, device=self._device)
        self._visible = torch.zeros((), dtype=self._model.dtype, device=self._device)
        self._masked = torch.full_like(self._visible, torch.finfo(self._model.dtype).min)
        idle = np.zeros(num_slots, np.int64)
        self.decode(idle, idle, np.ones(num_slots), np.zeros(num_slots))

    @torch.inference_mode()
    def decode(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        temperatures: NDArray[np.float64],
        uniforms: NDArray[np.float64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Next tokens of all slots and their log-probabilities, each [num_slots].

        tokens, positions: [num_slots] each slot's newest token and where it stands.
        temperatures: [num_slots]; 0 takes the likeliest token, its log-probability at 1.
        uniforms: [num_slots] in [0, 1): the point of the cumulative distribution that is drawn.
        A slot whose logits are not finite gets log-probability NaN.
        """
        at = torch.from_numpy(positions).to(self._device)
        mask = torch.where(self._key_positions <= at[:, None], self._visible, self._masked)
        self._cache.aim_at_next(at)
        logits = self._forward(
            torch.from_numpy(tokens).to(self._device)[:, None], at[:, None], mask[:, None, None]
        )
        sampled, logprobs = _sample(
            logits,
            torch.from_numpy(temperatures).to(self._device),
            torch.from_numpy(uniforms).to(self._device),
        )
        return sampled.cpu().numpy(), logprobs.cpu().numpy()

    def prefill(self, tokens: NDArray[np.int64], slots: Sequence[int]) -> None:
        """Computes the keys and values of one sequence ([P]) once, into all of `slots`.

        One sequence a pass: a prompt's keys and values then do not depend on its neighbours.
        """
        if len(tokens):
            self._fill(tokens[None], slots)

    @torch.inference_mode()
    def copy_prefix(self, source: int, slots: Sequence[int], *, length: int) -> None:
        """Copies the keys and values of the first `length` positions of `source` to `slots`."""
        self._cache.copy_prefix(source, torch.tensor(slots, device=self._device), length=length)

    def prefill_each(self, sequences: Sequence[NDArray[np.int64]], slots: Sequence[int]) -> None:
        """Computes the keys and values of `sequences[i]` ([L_i]) into `slots[i]`, many a pass."""
        order = sorted(
            (i for i, s in enumerate(sequences) if len(s)), key=lambda i: len(sequences[i])
        )
        while order:
            num_rows = max(1, min(len(order), _RECOMPUTE_TOKENS // len(sequences[order[-1]])))
            chosen, order = order[-num_rows:], order[:-num_rows]
            # What padding writes lies past the end of its sequence: decoding overwrites it first.
            padded = np.zeros((num_rows, len(sequences[chosen[-1]])), np.int64)
            for row, i in zip(padded, chosen, strict=True):
                row[: len(sequences[i])] = sequences[i]
            self._fill(padded, [slots[i] for i in chosen])

    @torch.inference_mode()
    def _fill(self, tokens: NDArray[np.int64], slots: Sequence[int]) -> None:
        at = self._key_positions[: tokens.shape[1]]
        mask = torch.where(at <= at[:, None], self._visible, self._masked)
        self._cache.aim_at_start(torch.tensor(slots, device=self._device))
        self._forward(torch.from_numpy(tokens).to(self._device), at[None], mask[None, None])

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """[B, V] logits after the last of [B, Q] tokens.

        positions: [B or 1, Q]; mask: [B or 1, 1, Q, K], added to the attention scores.
        """
        arguments: dict[str, Any] = {self._cache_argument: self._cache}
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **arguments,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def read_weights(self, folder: Path) -> dict[str, torch.Tensor]:
        """The tensors in `folder`, checked against the model; changes nothing.

        Raises FileNotFoundError when there are none, ValueError naming those that are missing,
        unexpected or of another shape. Tied weights need only one of their names.
        """
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no *.safetensors file in {folder}; nothing was loaded")
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        own = self._model.state_dict()
        present = {own[name].data_ptr() for name in tensors if name in own}
        problems = [f"{name} is unexpected" for name in sorted(set(tensors) - set(own))]
        problems += [f"{name} is missing" for name in own if own[name].data_ptr() not in present]
        problems += [
            f"{name} has shape {list(tensor.shape)}, the model's is {list(own[name].shape)}"
            for name, tensor in tensors.items()
            if name in own and tensor.shape != own[name].shape
        ]
        if problems:
            shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
            raise ValueError(
                f"weights in {folder} do not fit the model ({len(problems)} problems): {shown}; "
                "publish the state_dict of the same architecture, with Hugging Face names"
            )
        return tensors

    @torch.no_grad()
    def copy_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes tensors that `read_weights` returned, in place."""
        own = self._model.state_dict()
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def uniforms(seeds: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """[n] numbers in [0, 1), each a function of its own (seed, counter) alone.

    A counter-based generator (two rounds of the SplitMix64 finaliser), so that the k-th token of a
    request draws the same number whatever else is in the batch and wherever it was interrupted.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    streams = _mix(seeds + step)
    mixed = _mix(streams + (counters.astype(np.uint64) + np.uint64(1)) * step)
    # 52 bits, not 53: u * total then always rounds to below total.
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _sample(
    logits: torch.Tensor, temperatures: torch.Tensor, points: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[S] tokens by inverse CDF in float64, and their float32 log-probabilities, of [S, V]."""
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures).to(torch.float32)
    logprobs = torch.log_softmax(logits.to(torch.float32) / scale[:, None], dim=-1)
    cumulative = logprobs.to(torch.float64).exp_().cumsum_(dim=-1)
    tokens = (cumulative <= (points * cumulative[:, -1])[:, None]).sum(dim=-1)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _cache_argument(model: Any) -> str:
    """Older releases of transformers call the argument `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _stop_tokens(model: Any) -> NDArray[np.int64]:
    """End-of-text ids of the generation config, else of the model config; may be none."""
    ids = model.generation_config.eos_token_id if model.generation_config else None
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    return np.atleast_1d(np.array([] if ids is None else ids, np.int64))


def _check_attention(config: Any, *, max_model_len: int) -> None:
    """Raises ValueError for what a slot cache cannot serve exactly."""
    types = set(config.to_dict().get("layer_types") or ["full_attention"])
    window = config.to_dict().get("sliding_window")
    longest = config.to_dict().get("max_position_embeddings")
    advice = "use rollout.engine.type=vllm for this model"
    if types - _ATTENTION_TYPES:
        raise ValueError(
            f"the built-in engine runs {sorted(_ATTENTION_TYPES)} layers, the model also has "
            f"{sorted(types - _ATTENTION_TYPES)}; {advice}"
        )
    if window is not None and window < max_model_len:
        raise ValueError(
            f"the model's sliding_window={window} is shorter than max_model_len={max_model_len}; "
            f"lower rollout.max_prompt_tokens or rollout.max_response_tokens, or {advice}"
        )
    if longest is not None and longest < max_model_len:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the model's max_position_embeddings={longest}; "
            "lower rollout.max_prompt_tokens or rollout.max_response_tokens"
        )
