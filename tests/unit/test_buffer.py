"""The trajectory buffer's Python face: order, credits, waiting, processes, errors."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl import buffer as buffer_module
from asyncrl.buffer import (
    BooksDoNotBalance,
    BufferClosed,
    BufferExists,
    BufferForeign,
    BufferNoMemory,
    BufferNotFound,
    BufferStaleHandle,
    BufferTimeout,
    Lease,
    Ticket,
    TrajectoryBuffer,
)
from asyncrl.trajectory import FinishReason, PromptGroup, Trajectory

_SHM = Path("/dev/shm")
_PATIENCE_S = 30.0


def _create(**changes: Any) -> TrajectoryBuffer:
    settings = {"staleness_threshold": 1.0, "groups_per_version": 2, "capacity_bytes": 1 << 16}
    return TrajectoryBuffer.create(f"test-{uuid.uuid4().hex}", **{**settings, **changes})


@pytest.fixture
def buffer() -> Iterator[TrajectoryBuffer]:
    with _create() as made:
        yield made


def _put(buffer: TrajectoryBuffer, ticket: Ticket, *, version: int | None = None) -> None:
    buffer.reserve(ticket, 8, timeout_s=_PATIENCE_S).view(np.int64)[0] = ticket.index
    version = ticket.policy_version if version is None else version
    buffer.publish(ticket, np.array([[0, version]]))


def _group(prompt_index: int, versions: list[list[int]]) -> PromptGroup:
    trajectories = [
        Trajectory(
            completion_tokens=np.arange(len(v), dtype=np.int32) + prompt_index,
            behavior_logprobs=-np.arange(len(v), dtype=np.float32),
            token_versions=np.array(v, np.int32),
            finish_reason=FinishReason.LENGTH,
            reward=float(i),
            advantage=i - 0.5,
        )
        for i, v in enumerate(versions)
    ]
    return PromptGroup(prompt_index, np.array([3, 1, 2], np.int32), trajectories)


def test_credits_and_bound_are_derived() -> None:
    with _create(staleness_threshold=0.29, groups_per_version=100, lookahead=72) as buffer:
        assert buffer.num_slots == 129
        assert buffer.max_staleness == 2


def test_a_group_comes_back_as_it_was_put(buffer: TrajectoryBuffer) -> None:
    for version in (1, 2):
        buffer.cut_version(version)
    buffer.put_group(buffer.admit(0), _group(0, [[0, 0, 1], [1, 2]]))
    lease = buffer.take(0)
    assert lease.segments.tolist() == [[0, 0], [2, 1], [4, 2]]
    assert (lease.min_version, lease.max_version) == (0, 2)
    assert buffer.staleness(lease) == 2
    assert buffer.segment_staleness(lease).tolist() == [2, 1, 0]
    group = lease.group()
    assert group.prompt_index == 0
    assert group.prompt_tokens.tolist() == [3, 1, 2]
    assert [t.completion_tokens.tolist() for t in group.trajectories] == [[0, 1, 2], [0, 1]]
    assert [t.behavior_logprobs.tolist() for t in group.trajectories] == [[0, -1, -2], [0, -1]]
    assert [(t.reward, t.advantage) for t in group.trajectories] == [(0, -0.5), (1, 0.5)]


def test_the_payload_is_shared_memory_that_cannot_be_written(buffer: TrajectoryBuffer) -> None:
    ticket = buffer.admit(0)
    written = buffer.reserve(ticket, 8)
    buffer.publish(ticket, np.array([[0, 0]]))
    lease = buffer.take(0)
    assert np.shares_memory(written, lease.payload)
    with pytest.raises(ValueError, match="read-only"):
        lease.payload[0] = 1


def test_an_array_outlives_the_buffer_object() -> None:
    with _create() as buffer:
        ticket = buffer.admit(0)
        payload = buffer.reserve(ticket, 1 << 12)
    payload[:] = 7
    assert payload.sum() == 7 << 12


def test_evicted_prompts_are_admitted_again_before_new_ones(buffer: TrajectoryBuffer) -> None:
    for _ in range(2):
        _put(buffer, buffer.admit(0))
    buffer.take(0).evict("stale", requeue=True)
    buffer.take(0).evict("unwanted", requeue=False)
    assert [buffer.admit(0).prompt_index for _ in range(2)] == [0, 2]
    stats = buffer.stats()
    assert (stats["num_evicted_stale"], stats["num_evicted_unwanted"]) == (1, 1)


def test_a_lease_left_without_an_outcome_is_put_back(buffer: TrajectoryBuffer) -> None:
    for _ in range(2):
        _put(buffer, buffer.admit(0))
    with buffer.take(0) as lease:
        assert lease.index == 0
    assert [lease.index for lease in buffer.take_many(2, 0)] == [0, 1]


def test_take_many_puts_groups_back_when_it_fails(buffer: TrajectoryBuffer) -> None:
    _put(buffer, buffer.admit(0))
    with pytest.raises(BufferTimeout):
        buffer.take_many(2, 0.01)
    assert buffer.take(0).index == 0


def test_a_timeout_names_what_it_waited_for_and_who_holds_it(buffer: TrajectoryBuffer) -> None:
    for _ in range(4):
        buffer.admit(0)
    with pytest.raises(BufferTimeout, match=r"a slot credit: 0 of 4 .* free") as error:
        buffer.admit(0.01)
    assert isinstance(error.value, TimeoutError)
    with pytest.raises(BufferTimeout, match=rf"group is 0 .* WRITING by process {os.getpid()}"):
        buffer.take(0)
    assert "WRITING" in repr(buffer)


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan")])
def test_a_wait_without_deadline_is_refused(buffer: TrajectoryBuffer, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        buffer.take(timeout_s)


@pytest.mark.parametrize("method", ["admit", "take"])
def test_close_wakes_a_thread_that_waits(method: str) -> None:
    with _create(staleness_threshold=0.0, groups_per_version=1) as buffer:
        if method == "admit":
            buffer.admit(0)
        is_waiting = threading.Event()

        def wait() -> None:
            is_waiting.set()
            getattr(buffer, method)(_PATIENCE_S)

        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(wait)
            is_waiting.wait(_PATIENCE_S)
            buffer.close()
            with pytest.raises(BufferClosed):
                future.result(_PATIENCE_S)


async def test_asyncio_waits_end_with_the_group_the_deadline_or_the_close(
    buffer: TrajectoryBuffer,
) -> None:
    taking = asyncio.create_task(buffer.take_async(_PATIENCE_S))
    ticket = await buffer.admit_async(_PATIENCE_S)
    await buffer.put_group_async(ticket, _group(0, [[0]]), _PATIENCE_S)
    assert (await taking).index == 0
    with pytest.raises(BufferTimeout):
        await buffer.take_async(0.01)
    taking = asyncio.create_task(buffer.take_async(_PATIENCE_S))
    await asyncio.sleep(0)
    buffer.close()
    with pytest.raises(BufferClosed):
        await taking


async def test_a_cancelled_wait_has_taken_nothing(buffer: TrajectoryBuffer) -> None:
    taking = asyncio.create_task(buffer.take_async(_PATIENCE_S))
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    _put(buffer, buffer.admit(0))
    assert buffer.take(0).index == 0


def test_a_signal_gets_through_a_wait(buffer: TrajectoryBuffer) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        buffer.take(_PATIENCE_S)
    timer.join()
    signal.signal(signal.SIGINT, before)


def test_a_handle_cannot_be_used_twice(buffer: TrajectoryBuffer) -> None:
    ticket = buffer.admit(0)
    _put(buffer, ticket)
    with pytest.raises(BufferStaleHandle, match="ticket"):
        buffer.withdraw(ticket, "failed")
    lease = buffer.take(0)
    lease.release("trained")
    with pytest.raises(BufferStaleHandle, match="lease"):
        lease.release("trained")
    with pytest.raises(BufferStaleHandle):
        buffer.view(lease.handle)


def test_bad_values_are_named(buffer: TrajectoryBuffer) -> None:
    ticket = buffer.admit(0)
    with pytest.raises(ValueError, match=r"100000 bytes .* raise buffer\.capacity_bytes"):
        buffer.reserve(ticket, 100_000)
    with pytest.raises(ValueError, match="call reserve first"):
        buffer.publish(ticket, np.array([[0, 0]]))
    buffer.reserve(ticket, 8, max_segments=1)
    for segments, message in [
        ([[1, 0]], "must start at 0"),
        ([[0, 1]], "versions that exist are 0 to 0"),
        ([[0, 0], [1, 0]], "max_segments=1"),
        ([0, 0], r"\[M, 2\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            buffer.publish(ticket, np.array(segments))
    with pytest.raises(ValueError, match="cause='bored' is unknown"):
        buffer.withdraw(ticket, "bored")
    with pytest.raises(ValueError, match=r"cut_version\(3\).* 1"):
        buffer.cut_version(3)
    with pytest.raises(ValueError, match=r"set_version\(1\)"):
        buffer.set_version(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"staleness_threshold": -1.0}, "staleness_threshold"),
        ({"staleness_threshold": float("nan")}, "staleness_threshold"),
        ({"staleness_threshold": 1e9}, "slots; at most"),
        ({"groups_per_version": 0}, "groups_per_version=0"),
        ({"lookahead": -1}, "lookahead=-1"),
        ({"capacity_bytes": 1}, "capacity_bytes=1"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _create(**changes)


def test_too_little_shared_memory_names_the_setting_and_leaves_no_file() -> None:
    name = f"test-{uuid.uuid4().hex}"
    with pytest.raises(BufferNoMemory, match=r"buffer\.capacity_bytes"):
        TrajectoryBuffer.create(
            name, staleness_threshold=0, groups_per_version=1, capacity_bytes=1 << 45
        )
    assert not (_SHM / f"asyncrl-{name}").exists()


def test_a_name_is_private_and_used_once_and_gone_after_the_run() -> None:
    with _create() as buffer:
        path = _SHM / f"asyncrl-{buffer.name}"
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(BufferExists, match="choose another"):
            TrajectoryBuffer.create(
                buffer.name, staleness_threshold=0, groups_per_version=1, capacity_bytes=1 << 12
            )
    assert not path.exists()
    with pytest.raises(BufferNotFound, match="already unlinked"):
        TrajectoryBuffer.attach(buffer.name)
    with pytest.raises(BufferClosed, match="detached"):
        buffer.admit(0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:100], "too small"),
        (lambda raw: b"\0" * len(raw), "no trajectory buffer"),
        (lambda raw: raw[:8] + b"\x63" + raw[9:], "layout version 99"),
        (lambda raw: raw[:-4096], "damaged"),
    ],
)
def test_a_foreign_file_is_refused(damage: Any, message: str) -> None:
    name = f"test-{uuid.uuid4().hex}"
    path = _SHM / f"asyncrl-{name}"
    with _create() as buffer:
        path.write_bytes(damage((_SHM / f"asyncrl-{buffer.name}").read_bytes()))
    try:
        with pytest.raises(BufferForeign, match=message):
            TrajectoryBuffer.attach(name)
    finally:
        path.unlink()


def test_books_that_do_not_balance_are_reported(
    buffer: TrajectoryBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer.admit(0)
    buffer.assert_books_balance()
    stats = {**buffer.stats(), "num_in_flight": 0}
    monkeypatch.setattr(buffer, "stats", lambda: stats)
    with pytest.raises(BooksDoNotBalance, match="num_admitted=1 groups, but 0 are"):
        buffer.assert_books_balance()


def test_the_command_line_prints_a_live_buffer(
    buffer: TrajectoryBuffer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert buffer_module._main([buffer.name]) == 0
    assert "num_slots                4" in capsys.readouterr().out
    assert buffer_module._main(["no-such-buffer"]) == 1
    assert "no-such-buffer" in capsys.readouterr().err


def test_numpy_is_the_only_import() -> None:
    code = (
        "import sys, asyncrl.buffer;"
        "print({'torch', 'ray', 'vllm', 'transformers', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"


def _payload(index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(index).integers(0, 256, 100 + index * 37 % 3000, np.uint8)


def _produce(name: str) -> None:
    buffer = TrajectoryBuffer.attach(name)
    try:
        while True:
            ticket = buffer.admit(_PATIENCE_S)
            payload = _payload(ticket.index)
            buffer.reserve(ticket, len(payload), timeout_s=_PATIENCE_S)[:] = payload
            buffer.publish(ticket, np.array([[0, ticket.policy_version]]))
    except BufferClosed:
        pass


def _read_views(name: str, handles: Any, answers: Any) -> None:
    buffer = TrajectoryBuffer.attach(name)
    while (handle := handles.get(timeout=_PATIENCE_S)) is not None:
        answers.put(int(buffer.view(handle).sum(dtype=np.int64)))


def test_processes_move_groups_whole_and_in_order() -> None:
    context = multiprocessing.get_context("spawn")
    # Room for all slots' groups however they lie: an evicted one would come back out of order.
    with _create(capacity_bytes=1 << 16) as buffer:
        handles, answers = context.Queue(), context.Queue()
        processes = [
            *(context.Process(target=_produce, args=(buffer.name,)) for _ in range(2)),
            context.Process(target=_read_views, args=(buffer.name, handles, answers)),
        ]
        for process in processes:
            process.start()
        indices = []
        for i in range(300):
            lease: Lease = buffer.take(_PATIENCE_S)
            expected = _payload(lease.index)
            assert (lease.payload == expected).all()
            indices.append(lease.index)
            if i % 100 == 0:
                handles.put(pickle.loads(pickle.dumps(lease.handle)))
                assert answers.get(timeout=_PATIENCE_S) == expected.sum()
            assert buffer.staleness(lease) <= buffer.max_staleness
            lease.release("trained")
            if i % 2 == 1:
                buffer.cut_version(i // 2 + 1)
                buffer.set_version(i // 2 + 1)
                buffer.assert_books_balance()
        assert indices == list(range(300))
        handles.put(None)
        buffer.close()
        for process in processes:
            process.join(_PATIENCE_S)
        assert [process.exitcode for process in processes] == [0, 0, 0]
