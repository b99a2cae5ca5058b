"""The built-in engine against plain transformers forward passes of the same tiny model."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from asyncrl.engines import _slot_model
from asyncrl.engines.builtin import Config, Engine
from asyncrl.interfaces import Completion, GenerationRequest
from asyncrl.trajectory import FinishReason, version_segments

STOP = 11
MAX_MODEL_LEN = 64
DEADLINE_S = 60.0


def save_model(folder: Path, *, seed: int, tied: bool = False, stop: int | None = STOP) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        dtype="float32",
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=stop)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two sets of weights of one architecture that almost never stops early."""
    root = tmp_path_factory.mktemp("models")
    return [save_model(root / str(seed), seed=seed, stop=None) for seed in range(2)]


@pytest.fixture
async def make_engine(tmp_path: Path):
    """A function that starts engines; all are closed afterwards."""
    engines = []

    async def make(folder: Path, *, num_threads: int = 1, **settings: object) -> Engine:
        engine = Engine(
            Config(**{"num_slots": 16, **settings}),
            model_folder=folder,
            log_folder=tmp_path / "logs",
            seed=0,
            num_threads=num_threads,
            device="cpu",
            max_model_len=MAX_MODEL_LEN,
        )
        engines.append(engine)
        await engine.start()
        return engine

    yield make
    for engine in engines:
        await engine.close()


def request(
    prompt: list[int], *, seed: int = 0, length: int = 12, temperature: float = 1.0
) -> GenerationRequest:
    tokens = np.array(prompt, np.int32)
    return GenerationRequest(f"r{seed}", tokens, length, temperature, seed)


def reference_logprobs(
    folder: Path, prompt: list[int], tokens: np.ndarray, *, temperature: float = 1.0
) -> np.ndarray:
    """Log-probabilities of `tokens` from one plain forward pass over prompt + tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None])[:, 0].numpy()


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        await asyncio.sleep(0)


def assert_same(left: Completion, right: Completion) -> None:
    np.testing.assert_array_equal(left.tokens, right.tokens)
    np.testing.assert_array_equal(
        left.logprobs.view(np.int32), right.logprobs.view(np.int32), "not bit-equal"
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4, 5]])
async def test_logprobs_are_those_of_a_plain_forward_pass(make_engine, models, prompt, temperature):
    engine = await make_engine(models[0])
    done = await engine.generate(request(prompt, length=30, temperature=temperature))
    expected = reference_logprobs(models[0], prompt, done.tokens, temperature=temperature)
    np.testing.assert_allclose(done.logprobs, expected, rtol=0, atol=1e-5)
    assert done.finish_reason == FinishReason.LENGTH
    assert done.tokens.tolist() != done.tokens[:1].tolist() * 30
    assert (done.tokens.dtype, done.logprobs.dtype) == (np.int32, np.float32)
    assert done.token_versions.tolist() == [0] * 30


@pytest.mark.parametrize(("num_slots", "num_threads"), [(7, 1), (16, 1), (16, 2)])
async def test_a_completion_is_bit_equal_whatever_else_is_in_the_batch(
    make_engine, models, num_slots, num_threads
):
    engine = await make_engine(models[0], num_slots=num_slots, num_threads=num_threads)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 11, rng.integers(1, 20)).tolist() for _ in range(8)]
    requests = [request(prompts[i % 8], seed=i, length=int(rng.integers(1, 30))) for i in range(41)]
    alone = [await engine.generate(r) for r in requests[:12]]
    together = await asyncio.gather(*(engine.generate(r) for r in requests))
    reordered = await asyncio.gather(*(engine.generate(r) for r in reversed(requests)))
    fresh = await (
        await make_engine(models[0], num_slots=num_slots, num_threads=num_threads)
    ).generate(requests[20])
    for first, second in zip(alone, together, strict=False):
        assert_same(first, second)
    for first, second in zip(together, reversed(reordered), strict=True):
        assert_same(first, second)
    assert_same(together[20], fresh)


async def test_different_seeds_sample_the_models_distribution(make_engine, models):
    engine = await make_engine(models[0], num_slots=64)
    prompt, num = [1, 2, 3], 2000
    done = await asyncio.gather(
        *(engine.generate(request(prompt, seed=s, length=1)) for s in range(num))
    )
    counts = np.bincount([c.tokens[0] for c in done], minlength=12)
    expected = np.exp(reference_logprobs_of_next(models[0], prompt))
    # Five standard deviations of a binomial count.
    np.testing.assert_array_less(
        np.abs(counts - num * expected), 5 * np.sqrt(num * expected * (1 - expected)) + 1
    )


def reference_logprobs_of_next(folder: Path, prompt: list[int]) -> np.ndarray:
    return np.concatenate(
        [reference_logprobs(folder, prompt, np.array([token])) for token in range(12)]
    )


async def test_greedy_equals_generate_of_transformers(make_engine, models):
    engine = await make_engine(models[0])
    prompt = [4, 2, 7]
    done = await engine.generate(request(prompt, length=40, temperature=0.0))
    model = AutoModelForCausalLM.from_pretrained(models[0])
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)
    assert done.tokens.tolist() == expected[0, 3:].tolist()
    np.testing.assert_allclose(
        done.logprobs, reference_logprobs(models[0], prompt, done.tokens), rtol=0, atol=1e-5
    )


async def test_completion_ends_with_the_stop_token_of_the_generation_config(make_engine, tmp_path):
    folder = save_model(tmp_path / "stopping", seed=0, stop=STOP)
    engine = await make_engine(folder)
    done = await asyncio.gather(
        *(engine.generate(request([1, 2], seed=s, length=60)) for s in range(16))
    )
    assert {c.finish_reason for c in done} >= {FinishReason.STOP}
    for c in done:
        assert (c.tokens[-1] == STOP) == (c.finish_reason == FinishReason.STOP)
        assert STOP not in c.tokens[:-1]


async def test_swap_in_flight_stamps_each_token_with_the_weights_that_gave_its_logprob(
    make_engine, models
):
    engine = await make_engine(models[0])
    prompts = [[1, 2, 3], [5], [7, 8, 9, 10]]
    running = [
        asyncio.create_task(engine.generate(request(p, seed=i, length=60)))
        for i, p in enumerate(prompts)
    ]
    await until(lambda: engine.stats()["num_generated_tokens"] >= 15)
    await engine.load_weights(models[1], version=3, keep_requests=True)
    for prompt, done in zip(prompts, await asyncio.gather(*running), strict=True):
        segments = version_segments(done.token_versions).tolist()
        assert [version for _, version in segments] == [0, 3]
        cut = segments[1][0]
        expected = [
            *reference_logprobs(models[0], prompt, done.tokens)[:cut],
            *reference_logprobs(models[1], prompt, done.tokens)[cut:],
        ]
        np.testing.assert_allclose(done.logprobs, expected, rtol=0, atol=1e-5)
    later = await engine.generate(request(prompts[0], seed=9))
    np.testing.assert_allclose(
        later.logprobs, reference_logprobs(models[1], prompts[0], later.tokens), rtol=0, atol=1e-5
    )


async def test_keep_leaves_old_keys_to_running_requests_and_to_no_later_one(make_engine, models):
    engine = await make_engine(models[0], kv_on_update="keep")
    prompt = [1, 2, 3, 4, 5, 6]
    running = asyncio.create_task(engine.generate(request(prompt, length=50)))
    await until(lambda: engine.stats()["num_generated_tokens"] >= 5)
    await engine.load_weights(models[1], version=1, keep_requests=True)
    later, old = await asyncio.gather(engine.generate(request(prompt, seed=1)), running)
    cut = int(np.argmax(old.token_versions == 1))
    fresh = reference_logprobs(models[1], prompt, old.tokens)
    assert old.token_versions.tolist() == [0] * cut + [1] * (50 - cut)
    assert np.abs(old.logprobs - fresh)[cut:].max() > 1e-2
    np.testing.assert_allclose(
        later.logprobs, reference_logprobs(models[1], prompt, later.tokens), rtol=0, atol=1e-5
    )


async def test_without_keep_requests_running_ones_finish_under_the_old_weights_first(
    make_engine, models
):
    engine = await make_engine(models[0], num_slots=2)
    first = [asyncio.create_task(engine.generate(request([1], seed=s, length=50))) for s in (1, 2)]
    await until(lambda: engine.stats()["num_generated_tokens"] >= 4)
    swap = asyncio.create_task(engine.load_weights(models[1], version=1, keep_requests=False))
    await asyncio.sleep(0)
    late = asyncio.create_task(engine.generate(request([1], seed=1, length=50)))
    await asyncio.gather(*first, swap, late)
    assert [set(t.result().token_versions.tolist()) for t in (*first, late)] == [{0}, {0}, {1}]
    expected = reference_logprobs(models[1], [1], late.result().tokens)
    np.testing.assert_allclose(late.result().logprobs, expected, rtol=0, atol=1e-5)


async def test_tied_weights_load_under_either_name(make_engine, tmp_path):
    folders = [save_model(tmp_path / str(s), seed=s, tied=True, stop=None) for s in range(2)]
    engine = await make_engine(folders[0])
    tensors = load_file(folders[1] / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    (tmp_path / "renamed").mkdir()
    save_file(tensors, tmp_path / "renamed" / "model.safetensors")
    for version, folder in enumerate([folders[1], tmp_path / "renamed"], start=1):
        await engine.load_weights(folder, version=version, keep_requests=True)
        done = await engine.generate(request([1, 2]))
        expected = reference_logprobs(folders[1], [1, 2], done.tokens)
        np.testing.assert_allclose(done.logprobs, expected, rtol=0, atol=1e-5)


async def test_weights_that_do_not_fit_are_refused_by_name_and_the_old_ones_serve_on(
    make_engine, models, tmp_path
):
    engine = await make_engine(models[0])
    before = await engine.generate(request([1, 2]))
    tensors = load_file(models[1] / "model.safetensors")
    tensors["model.extra"] = torch.zeros(1)
    tensors["model.norm.weight"] = torch.zeros(31)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="3 problems") as error:
        await engine.load_weights(tmp_path, version=1, keep_requests=True)
    for problem in (
        "model.extra is unexpected",
        "lm_head.weight is missing",
        "model.norm.weight has shape [31], the model's is [32]",
    ):
        assert problem in str(error.value)
    with pytest.raises(FileNotFoundError, match="no \\*.safetensors file in"):
        await engine.load_weights(tmp_path / "absent", version=1, keep_requests=True)
    with pytest.raises(ValueError, match="version=0 is not above version 0"):
        await engine.load_weights(models[1], version=0, keep_requests=True)
    after = await engine.generate(request([1, 2]))
    assert_same(before, after)
    assert after.token_versions.tolist() == [0] * 12


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request([]), "prompt_tokens is empty"),
        (request([1] * 60, length=5), "60 prompt tokens \\+ max_new_tokens=5 exceed"),
        (request([1, 12]), "range over 1..12, the model's vocabulary over 0..11"),
        (request([1], length=0), "max_new_tokens=0 must be at least 1"),
        (request([1], temperature=-1.0), "temperature=-1.0 must be"),
    ],
)
async def test_request_that_cannot_be_served_is_refused_and_others_go_on(
    make_engine, models, bad, message
):
    engine = await make_engine(models[0])
    with pytest.raises(ValueError, match=message):
        await engine.generate(bad)
    assert len((await engine.generate(request([1] * 60, length=4))).tokens) == 4


async def test_cancelled_calls_free_their_slots(make_engine, models):
    engine = await make_engine(models[0], num_slots=2)
    doomed = [asyncio.create_task(engine.generate(request([1], length=63))) for _ in range(6)]
    await until(lambda: engine.stats()["num_generated_tokens"] >= 2)
    for task in doomed:
        task.cancel()
    results = await asyncio.gather(*doomed, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results)
    await engine.generate(request([2], length=3))
    await until(lambda: engine.stats()["num_running"] + engine.stats()["num_waiting"] == 0)
    assert engine.stats()["num_generated_tokens"] < 6 * 63


async def test_close_ends_waiting_calls_and_refuses_later_ones(make_engine, models):
    engine = await make_engine(models[0], num_slots=1)
    waiting = [asyncio.create_task(engine.generate(request([1], length=63))) for _ in range(50)]
    await until(lambda: engine.stats()["num_generated_tokens"] >= 1)
    swap = asyncio.create_task(engine.load_weights(models[1], version=1, keep_requests=False))
    await asyncio.sleep(0)
    await engine.close()
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), DEADLINE_S)
    assert isinstance(results[-1], RuntimeError)
    assert "closed before this call ended" in str(results[-1])
    with pytest.raises(RuntimeError, match="closed before this call ended"):
        await asyncio.wait_for(swap, DEADLINE_S)
    with pytest.raises(RuntimeError, match="closed"):
        await engine.generate(request([1]))
    await engine.close()


async def test_diverged_weights_fail_every_waiting_call_and_all_later_ones(
    make_engine, models, tmp_path
):
    engine = await make_engine(models[0])
    tensors = load_file(models[1] / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors")
    await engine.load_weights(tmp_path, version=1, keep_requests=True)
    calls = [engine.generate(request([1], seed=s)) for s in range(20)]
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), DEADLINE_S)
    assert all(isinstance(r, RuntimeError) for r in results)
    assert "weights of version 1 give logits that are not finite" in str(results[0])
    with pytest.raises(RuntimeError, match="version 1 give logits") as error:
        await engine.generate(request([1]))
    assert isinstance(error.value.__cause__, FloatingPointError)


async def test_start_names_a_model_that_cannot_be_served(make_engine, models, tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json in .*absent"):
        await make_engine(tmp_path / "absent")
    engine = Engine(
        Config(),
        model_folder=models[0],
        log_folder=tmp_path,
        seed=0,
        num_threads=1,
        device="cpu",
        max_model_len=65,
    )
    with pytest.raises(RuntimeError, match="has not started"):
        await engine.generate(request([1]))
    with pytest.raises(ValueError, match="max_model_len=65 exceeds .*max_position_embeddings=64"):
        await engine.start()
    await engine.close()


async def test_stats_count_tokens_and_busy_time(make_engine, models):
    engine = await make_engine(models[0])
    assert engine.stats() == {
        "num_running": 0,
        "num_waiting": 0,
        "num_generated_tokens": 0,
        "busy_s": 0,
    }
    await asyncio.gather(*(engine.generate(request([1], seed=s, length=7)) for s in range(20)))
    stats = engine.stats()
    assert stats["num_generated_tokens"] == 140
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["busy_s"] > 0


def test_uniforms_depend_on_their_own_seed_and_counter_alone_and_fill_the_unit_interval():
    seeds, counters = np.arange(100, dtype=np.uint64), np.arange(100)
    table = _slot_model.uniforms(np.repeat(seeds, 100), np.tile(counters, 100)).reshape(100, 100)
    assert table[3, 7] == _slot_model.uniforms(seeds[3:4], counters[7:8])[0]
    assert len(np.unique(table)) == table.size
    assert table.min() >= 0
    assert table.max() < 1
    # Ten bins of 1000 expected; five standard deviations are 150.
    assert np.abs(np.histogram(table, bins=10, range=(0, 1))[0] - 1000).max() < 150
    assert np.abs(table.mean(axis=0) - 0.5).max() < 5 * 0.289 / 10
    assert np.abs(table.mean(axis=1) - 0.5).max() < 5 * 0.289 / 10
