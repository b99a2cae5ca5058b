"""The random model's folder, and log-probs of completions under a model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from asyncrl.config import Model, RandomModel
from asyncrl.trainer.batcher import pack
from asyncrl.trainer.model import completion_logprobs, load_model, prepare_model_folder
from asyncrl.trajectory import FinishReason, PromptGroup, Trajectory

PROMPTS = [[2, 3, 4, 10], [5]]
COMPLETIONS = [[[6, 7, 1], [8]], [[9, 2, 3, 4, 1], [5, 1]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = RandomModel(alphabet="abcdefgh>", num_layers=2, hidden_size=32, num_heads=2)
    return prepare_model_folder(Model(random=random), tmp_path_factory.mktemp("model"), seed=3)


def trajectory(tokens: list[int]) -> Trajectory:
    zeros = np.zeros(len(tokens), np.int32)
    return Trajectory(
        np.array(tokens, np.int32), zeros.astype(np.float32), zeros, FinishReason.STOP
    )


def micro_batch_of_all():
    groups = [
        PromptGroup(i, np.array(prompt, np.int32), [trajectory(c) for c in completions])
        for i, (prompt, completions) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True))
    ]
    return pack(groups, rank=0, num_ranks=1, micro_batch_tokens=1000, pad_token_id=0)[0]


def naive_logprobs(model, temperature: float) -> dict[tuple[int, ...], torch.Tensor]:
    """By prompt and completion, one unpadded sequence at a time."""
    result = {}
    for prompt, completions in zip(PROMPTS, COMPLETIONS, strict=True):
        for completion in completions:
            logits = model(torch.tensor([prompt + completion])).logits[0] / temperature
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            tokens = torch.tensor(completion)[:, None]
            result[(*prompt, *completion)] = logprobs.gather(1, tokens).squeeze(1)
    return result


def test_tokenizer_gives_one_token_a_character_and_the_text_back(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert tokenizer("abch>")["input_ids"] == [2, 3, 4, 9, 10]
    assert tokenizer.decode([2, 3, 4, 9, 10]) == "abch>"
    assert tokenizer.decode([9, 1, 0], skip_special_tokens=True) == "h"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_random_folder_is_a_function_of_the_seed_with_untied_embeddings(
    folder: Path, tmp_path: Path
) -> None:
    random = RandomModel(alphabet="abcdefgh>", num_layers=2, hidden_size=32, num_heads=2)
    again = prepare_model_folder(Model(random=random), tmp_path / "same", seed=3)
    other = prepare_model_folder(Model(random=random), tmp_path / "other", seed=4)

    weights = [(f / "model.safetensors").read_bytes() for f in (folder, again, other)]

    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.eos_token_id, generation.pad_token_id) == (1, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_logits", [1 << 25, 40])
def test_completion_logprobs_equal_one_unpadded_forward_a_sequence(
    folder: Path, temperature: float, max_logits: int
) -> None:
    model = load_model(folder, dtype=torch.float32, gradient_checkpointing=False)
    micro_batch = micro_batch_of_all()
    expected = naive_logprobs(model, temperature)

    logprobs, entropy = completion_logprobs(
        model, micro_batch, temperature=temperature, max_logits=max_logits
    )

    assert entropy.shape == logprobs.shape
    for row, ids in enumerate(micro_batch.input_ids.tolist()):
        start, end = micro_batch.offsets[row : row + 2]
        sequence = tuple(i for i in ids if i != 0)
        torch.testing.assert_close(logprobs[start:end], expected[sequence], atol=1e-5, rtol=0)


@pytest.mark.parametrize("max_logits", [1 << 25, 40])
def test_gradients_equal_those_of_unpadded_forwards(folder: Path, max_logits: int) -> None:
    model = load_model(folder, dtype=torch.float32, gradient_checkpointing=True)
    micro_batch = micro_batch_of_all()
    logprobs, _ = completion_logprobs(model, micro_batch, temperature=1.0, max_logits=max_logits)
    logprobs.sum().backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.cat(list(naive_logprobs(model, 1.0).values())).sum().backward()

    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_model_path_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path=.*: no config\.json there"):
        prepare_model_folder(Model(path=tmp_path), tmp_path / "unused", seed=0)


def test_llama_folder_loads_as_llama(tmp_path: Path) -> None:
    random = RandomModel(architecture="llama", num_layers=1, hidden_size=16, num_heads=2)
    folder = prepare_model_folder(Model(random=random), tmp_path, seed=0)

    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "llama"


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"head_dim": 15}, r"multiple of 2"),
        ({"alphabet": "aab"}, r"alphabet='aab'"),
    ],
)
def test_random_model_that_cannot_be_built_is_refused(sizes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RandomModel(**sizes)
