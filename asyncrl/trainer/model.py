"""The policy as a model: where its folder comes from, and log-probs of completions under it.

Not here: sharding and export (`parallel`), the loss (`step`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asyncrl import config as configuration
from asyncrl.kernels import token_logprobs
from asyncrl.trainer.batcher import MicroBatch

MAX_LOGITS = 1 << 25
"""Logits that exist at one time: 128 MiB in float32."""

PAD, EOS = "<pad>", "<eos>"


def prepare_model_folder(config: configuration.Model, folder: Path, *, seed: int) -> Path:
    """A Hugging Face folder with weights, config, generation config and tokenizer.

    `model.path` is that folder already; `model.random` is built from `seed` and saved to `folder`.

    Raises ValueError when `model.path` holds no model.
    """
    if config.path is not None:
        if not (config.path / "config.json").is_file():
            raise ValueError(
                f"model.path={config.path}: no config.json there; set model.path to a Hugging Face "
                "folder (config.json, safetensors, tokenizer)"
            )
        return config.path
    assert config.random is not None
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _random_model(config.random)
    folder.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    _character_tokenizer(config.random).save_pretrained(folder)
    return folder


def load_model(folder: Path, *, dtype: torch.dtype, gradient_checkpointing: bool) -> Any:
    """The causal language model in `folder`, its weights in `dtype`, attention through sdpa."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def completion_logprobs(
    model: Any, micro_batch: MicroBatch, *, temperature: float, max_logits: int = MAX_LOGITS
) -> tuple[Tensor, Tensor]:
    """([T] log-probs of the completion tokens, [T] entropy of their distributions), float32.

    Only rows that predict a completion token go through the output layer, so [B * L, V] logits
    never exist. Those rows' logits, when more than `max_logits`, are computed in chunks and once
    more in the backward pass.
    """
    output_layer = model.get_output_embeddings()
    device = output_layer.weight.device
    input_ids = torch.from_numpy(micro_batch.input_ids).to(device)
    predictors = torch.from_numpy(micro_batch.predictors).to(device)
    tokens = torch.from_numpy(micro_batch.tokens).to(device)
    hidden = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
    rows = hidden.flatten(0, 1).index_select(0, predictors)
    chunk_size = max(1, max_logits // output_layer.weight.shape[0])
    if len(tokens) <= chunk_size:
        return _row_logprobs(output_layer, rows, tokens, temperature)
    chunks = [
        checkpoint(_row_logprobs, output_layer, *chunk, temperature, use_reentrant=False)
        for chunk in zip(
            torch.split(rows, chunk_size), torch.split(tokens, chunk_size), strict=True
        )
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class Policy(nn.Module):
    """A language model whose forward pass is `completion_logprobs`: the module that is sharded.

    Sharded modules gather their weights around their own forward call, so the output layer, which
    is used outside the language model's forward, must belong to a root that is called.
    """

    def __init__(self, model: Any, *, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """See `completion_logprobs`."""
        return completion_logprobs(self.model, micro_batch, temperature=self.temperature)


def _row_logprobs(
    output_layer: nn.Module, rows: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logprobs, entropy = token_logprobs(output_layer(rows), tokens, temperature=temperature)
    return logprobs, entropy


def _random_model(config: configuration.RandomModel) -> Any:
    """A small decoder with untied embeddings, so that input and output learn apart."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[config.architecture]
    model = model_class(
        config_class(
            vocab_size=2 + len(config.alphabet),
            hidden_size=config.hidden_size,
            intermediate_size=2 * config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 1
    return model


def _character_tokenizer(config: configuration.RandomModel) -> Any:
    """One token a character; characters outside the alphabet are an error."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *config.alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=config.max_positions,
        clean_up_tokenization_spaces=False,
    )
