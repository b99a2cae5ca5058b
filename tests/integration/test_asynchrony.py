"""The asynchrony of the whole system, on real parts in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config import Config
from tests.integration import parts


def _weights(folder: Path) -> dict[str, NDArray[np.float32]]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def _run_pipeline(config: Config) -> tuple[list[float], dict[str, NDArray[np.float32]]]:
    """Losses and final weights of the asynchronous system."""

    async def run(built: parts.Parts) -> tuple[list[float], dict[str, NDArray[np.float32]]]:
        try:
            record = await built.pipeline().run()
            last = built.folder.root / "last"
            await built.trainer.export_weights(last)
            return [row["loss"] for row in record.steps], _weights(last)
        finally:
            await built.stop()

    with parts.build(config) as built:
        return asyncio.run(run(built))


def _run_plain_loop(config: Config) -> tuple[list[float], dict[str, NDArray[np.float32]]]:
    """The textbook loop: generate a batch group after group, train, copy the weights, repeat."""

    async def run(built: parts.Parts) -> tuple[list[float], dict[str, NDArray[np.float32]]]:
        try:
            await built.trainer.start()
            await built.worker.start()
            losses = []
            for step in range(1, config.trainer.total_steps + 1):
                for _ in range(config.groups_per_step):
                    ticket = await built.buffer.admit_async(10)
                    await built.worker.rollouter.run_group(ticket)
                losses.append((await built.trainer.step()).metrics["loss"])
                folder = built.folder.root / f"v{step}"
                await built.trainer.export_weights(folder)
                built.buffer.cut_version(step)
                await built.worker.load_weights(folder, version=step)
                built.buffer.set_version(step)
            return losses, _weights(folder)
        finally:
            await built.stop()

    with parts.build(config) as built:
        return asyncio.run(run(built))


def test_staleness_zero_equals_the_synchronous_loop_bit_for_bit(
    tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    synchronous = ["async.staleness_threshold=0", "async.trigger_parameter_sync_step=1"]
    losses, weights = _run_pipeline(tiny_config(*synchronous, f"run.dir={tmp_path / 'async'}"))
    expected, expected_weights = _run_plain_loop(
        tiny_config(*synchronous, f"run.dir={tmp_path / 'plain'}")
    )
    assert losses == expected
    assert any(loss != 0 for loss in losses)
    assert weights.keys() == expected_weights.keys()
    for name, value in expected_weights.items():
        assert np.array_equal(weights[name], value), name


async def _train_by_hand(built: parts.Parts) -> list[float]:
    """GRPO and AdamW written out on a plain model; shares only the engine with the system."""
    config = built.config
    folder = built.folder.root / "initial_model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.trainer.lr, weight_decay=0.0)
    await built.worker.start()
    losses = []
    for step in range(1, config.trainer.total_steps + 1):
        total, num_tokens = torch.tensor(0.0), 0
        for index in range((step - 1) * config.groups_per_step, step * config.groups_per_step):
            group = await built.worker.rollouter.rollout_group(index)
            texts = [tokenizer.decode(t.completion_tokens, True) for t in group.trajectories]
            answer = tokenizer.decode(group.prompt_tokens).removesuffix(">")[::-1]
            rewards = torch.tensor([_share_of_right_letters(text, answer) for text in texts])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
                completion = torch.tensor(trajectory.completion_tokens.tolist())
                prompt = torch.tensor(group.prompt_tokens.tolist())
                logits = model(torch.cat([prompt, completion])[None]).logits[0]
                logits = logits[len(prompt) - 1 : -1]
                logprobs = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
                total = total - advantage * (logprobs - logprobs.detach()).exp().sum()
                num_tokens += len(completion)
        loss = total / num_tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
        weights = built.folder.root / f"v{step}"
        model.save_pretrained(weights)
        await built.worker.load_weights(weights, version=step)
    return losses


def _share_of_right_letters(text: str, answer: str) -> float:
    right = sum(a == b for a, b in zip(text, answer, strict=False))
    return right / max(len(text), len(answer))


def test_staleness_zero_is_grpo_as_written_by_hand(
    tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    settings = [
        "async.staleness_threshold=0",
        "async.trigger_parameter_sync_step=1",
        "async.rollout_correction=none",
        "algorithm.kl.coefficient=0",
    ]
    losses, _ = _run_pipeline(tiny_config(*settings, f"run.dir={tmp_path / 'async'}"))

    async def run(built: parts.Parts) -> list[float]:
        try:
            return await _train_by_hand(built)
        finally:
            built.buffer.close()
            await built.worker.stop()

    with parts.build(tiny_config(*settings, f"run.dir={tmp_path / 'hand'}")) as built:
        expected = asyncio.run(run(built))
    assert max(abs(loss) for loss in expected) > 1e-3
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-4)


def test_every_trained_token_is_within_the_bound_and_the_books_balance(
    tiny_config: Callable[..., Config],
) -> None:
    config = tiny_config(
        "async.staleness_threshold=1.5",
        "async.trigger_parameter_sync_step=2",
        "trainer.total_steps=12",
    )

    async def run(built: parts.Parts) -> tuple[list[float], dict[str, int]]:
        try:
            record = await built.pipeline().run()
            built.buffer.assert_books_balance()
            return [row["staleness/token_max"] for row in record.steps], built.buffer.stats()
        finally:
            await built.stop()

    with parts.build(config) as built:
        staleness, stats = asyncio.run(run(built))
    assert config.max_staleness == 2
    assert 0 < max(staleness) <= config.max_staleness
    assert stats["num_trained"] + stats["num_rejected"] == 12 * config.groups_per_step
    assert stats["engine_version"] == 6
