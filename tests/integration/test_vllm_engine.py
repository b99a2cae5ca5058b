"""vLLM as an engine, with real processes and a tiny random model. One start serves all tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray

from asyncrl.engines import vllm as adapter
from asyncrl.engines._vllm_processes import shared_memory
from asyncrl.interfaces import Completion, GenerationRequest
from asyncrl.trajectory import FinishReason, version_segments

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

TOLERANCE = 2e-4
"""Log-prob gap between vLLM and transformers, both float32; other weights give above 0.1."""
PROMPT = np.arange(5, 25, dtype=np.int32)
VOCABULARY = 128


def save_model(folder: Path, *, seed: int) -> Path:
    """A 2-layer, 64-wide random Qwen3 that is sure enough of itself to tell its versions apart."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # Norms start at 1; other values show whether they were loaded.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.8, 1.2)
    model.save_pretrained(folder)
    return folder


@dataclass
class Running:
    engine: adapter.Engine
    folders: list[Path]
    """Weights by policy version."""

    async def publish(self, *, keep_requests: bool) -> int:
        version = len(self.folders)
        folder = save_model(self.folders[0].parent / f"v{version}", seed=version)
        self.folders.append(folder)
        await self.engine.load_weights(folder, version=version, keep_requests=keep_requests)
        return version

    async def has_generated(self, num_tokens: int) -> None:
        """Returns once that many more tokens have arrived."""
        target = self.engine.stats()["num_generated_tokens"] + num_tokens
        async with asyncio.timeout(60):
            while self.engine.stats()["num_generated_tokens"] < target:
                await asyncio.sleep(0)

    def ask(
        self, *, seed: int, max_new_tokens: int, temperature: float = 1.0
    ) -> asyncio.Task[Completion]:
        name = f"{seed}-{max_new_tokens}-{len(self.folders)}"
        request = GenerationRequest(name, PROMPT, max_new_tokens, temperature, seed)
        return asyncio.create_task(self.engine.generate(request))

    def expected_logprobs(
        self, completion: Completion, version: int, temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """[L] transformers' log-probs of a completion under the weights of a version."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.folders[version], dtype=torch.float32)
        tokens = torch.tensor(np.concatenate([PROMPT, completion.tokens]), dtype=torch.long)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, len(PROMPT) - 1 : -1] / temperature
        logprobs = logits.log_softmax(-1).gather(1, tokens[len(PROMPT) :, None])[:, 0]
        return logprobs.numpy()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("vllm")
    model = save_model(folder / "v0", seed=0)
    engine = adapter.Engine(
        adapter.Config(max_num_seqs=16, kv_cache_bytes=64 << 20),
        model_folder=model,
        log_folder=folder / "logs",
        seed=0,
        num_threads=1,
        device="cpu",
        max_model_len=512,
    )
    await engine.start()
    yield Running(engine, [model])
    await engine.close()


async def test_a_device_that_vllm_was_not_built_for_is_refused(tmp_path: Path) -> None:
    engine = adapter.Engine(
        adapter.Config(),
        model_folder=tmp_path,
        log_folder=tmp_path,
        seed=0,
        num_threads=1,
        device="npu",
        max_model_len=512,
    )
    with pytest.raises(RuntimeError, match=r"device=npu, but the vLLM that is installed.*'cpu'"):
        await engine.start()


async def test_logprobs_are_those_of_the_sampled_distribution(running: Running) -> None:
    completions = await asyncio.gather(
        *(running.ask(seed=seed, max_new_tokens=32, temperature=0.7) for seed in range(4))
    )
    for completion in completions:
        expected = running.expected_logprobs(completion, 0, temperature=0.7)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
        assert completion.token_versions.tolist() == [0] * len(completion.tokens)


async def test_a_seed_gives_the_same_completion_whatever_else_runs(running: Running) -> None:
    alone = await running.ask(seed=7, max_new_tokens=16)
    others = [running.ask(seed=seed, max_new_tokens=24) for seed in range(20, 26)]
    again = await running.ask(seed=7, max_new_tokens=16)
    await asyncio.gather(*others)
    assert again.tokens.tolist() == alone.tokens.tolist()
    assert again.finish_reason is FinishReason.LENGTH


async def test_more_prompt_tokens_than_one_step_takes_are_all_answered(running: Running) -> None:
    def ask(seed: int) -> Coroutine[Any, Any, Completion]:
        prompt = np.random.default_rng(seed).integers(5, VOCABULARY, 500).astype(np.int32)
        request = GenerationRequest(f"long-{seed}", prompt, 4, temperature=1.0, seed=seed)
        return running.engine.generate(request)

    completions = await asyncio.gather(*(ask(seed) for seed in range(12)))
    assert [len(completion.tokens) for completion in completions] == [4] * 12


async def test_tokens_after_a_load_in_flight_come_from_the_new_weights(running: Running) -> None:
    old = len(running.folders) - 1
    tasks = [running.ask(seed=seed, max_new_tokens=200) for seed in range(6)]
    await running.has_generated(120)
    new = await running.publish(keep_requests=True)
    for completion in await asyncio.gather(*tasks):
        (_, first), (switch, second) = version_segments(completion.token_versions).tolist()
        assert (first, second) == (old, new)
        under_old = running.expected_logprobs(completion, old)
        under_new = running.expected_logprobs(completion, new)
        logprobs = completion.logprobs
        np.testing.assert_allclose(logprobs[:switch], under_old[:switch], atol=TOLERANCE)
        np.testing.assert_allclose(logprobs[switch:], under_new[switch:], atol=TOLERANCE)
        # One token the other side of the switch would be seen.
        assert abs(under_old[switch] - under_new[switch]) > 2 * TOLERANCE
        assert abs(under_old[switch - 1] - under_new[switch - 1]) > 2 * TOLERANCE


async def test_new_requests_never_meet_old_keys_and_values(running: Running) -> None:
    # The prompt's keys and values are cached by now: every test asks the same one.
    await running.ask(seed=0, max_new_tokens=200)
    version = await running.publish(keep_requests=True)
    completion = await running.ask(seed=0, max_new_tokens=8)
    expected = running.expected_logprobs(completion, version)
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


async def test_without_keep_a_completion_has_one_version(running: Running) -> None:
    old = len(running.folders) - 1
    before = [running.ask(seed=seed, max_new_tokens=100) for seed in range(20)]
    await running.has_generated(60)
    publication = asyncio.create_task(running.publish(keep_requests=False))
    await asyncio.sleep(0)
    after = [running.ask(seed=seed, max_new_tokens=10) for seed in range(4)]
    new = await publication
    for completions, version in ((before, old), (after, new)):
        for completion in await asyncio.gather(*completions):
            assert set(completion.token_versions.tolist()) == {version}
            expected = running.expected_logprobs(completion, version)
            np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


async def test_a_stop_token_ends_a_completion_and_is_part_of_it(running: Running) -> None:
    running.engine._stop_tokens.extend(range(2, VOCABULARY, 2))
    completion = await running.ask(seed=3, max_new_tokens=100)
    running.engine._stop_tokens.clear()
    assert completion.finish_reason is FinishReason.STOP
    assert completion.tokens[-1] % 2 == 0
    assert (completion.tokens[:-1] % 2 == 1).all()


async def test_a_version_that_is_not_above_the_present_one_is_refused(running: Running) -> None:
    with pytest.raises(ValueError, match="version=0 must be above"):
        await running.engine.load_weights(running.folders[0], version=0, keep_requests=True)


async def test_close_leaves_no_process_and_no_shared_memory(running: Running) -> None:
    processes: list[Any] = list(running.engine._processes)
    assert len(processes) >= 1
    assert all(process.is_running() for process in processes)
    segments = shared_memory(processes)
    assert any(segment.exists() for segment in segments)
    await running.engine.close()
    assert not any(segment.exists() for segment in segments)
    assert not any(process.is_running() for process in processes)
    with pytest.raises(RuntimeError, match="not running"):
        await running.ask(seed=0, max_new_tokens=1)
