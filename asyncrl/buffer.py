"""The trajectory buffer: whole prompt groups between processes of one machine, in shared memory.

It bounds staleness: a group takes a slot credit when its prompt is admitted, and the credit comes
back only when the engines hold the version that was trained on it. Usable alone; imports numpy and
nothing else. No lock is taken: a process may be killed at any instruction, and whoever waits next
reclaims what it held (see csrc/buffer/trajectory_buffer.h). Not here yet: saving to disk.

    ticket = buffer.admit(timeout_s=60)                  # rollout process
    buffer.put_group(ticket, group)
    ...
    with buffer.take(timeout_s=60) as lease:             # trainer process
        train(lease.group())
        lease.release("trained")
    buffer.cut_version(1)
    buffer.set_version(1)                                # once all engines hold version 1

`python -m asyncrl.buffer NAME` prints the state of a live buffer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl import _buffer
from asyncrl._buffer import (
    BufferClosed,
    BufferExists,
    BufferForeign,
    BufferNoMemory,
    BufferNotFound,
    BufferStaleHandle,
    BufferTimeout,
    TrajectoryBufferError,
)
from asyncrl.trajectory import (
    PromptGroup,
    group_num_bytes,
    read_group,
    version_segments,
    write_group,
)

__all__ = [
    "BooksDoNotBalance",
    "BufferClosed",
    "BufferExists",
    "BufferForeign",
    "BufferNoMemory",
    "BufferNotFound",
    "BufferStaleHandle",
    "BufferTimeout",
    "Handle",
    "Lease",
    "Ticket",
    "TrajectoryBuffer",
    "TrajectoryBufferError",
]

_T = TypeVar("_T")
_PREFIX = "asyncrl-"
_NO_WAIT = -1.0
_OUTCOMES = ("trained", "rejected", "evicted", "filtered", "failed", "in_flight")


class BooksDoNotBalance(TrajectoryBufferError):
    """Groups were lost or counted twice; the message carries all counters."""


class Handle(NamedTuple):
    """One use of one slot. Plain numbers: send it to any process attached to the same buffer."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right and duty to fill one slot: `put_group` (or reserve and publish), or `withdraw`."""

    handle: Handle
    index: int
    """k: number of this admission, from 0."""
    prompt_index: int
    """Position in the prompt stream of the prompt to roll out."""
    policy_version: int
    """Version that all engines held at admission; no token can be older."""


class Lease:
    """A group that was taken: read it, then `release`, `evict` or `put_back` it, once.

    As a context manager it puts the group back when it is left without one of these.
    """

    def __init__(self, buffer: TrajectoryBuffer, group: _buffer._Group) -> None:
        handle, index, prompt_index, min_version, max_version, payload, segments = group
        self._buffer = buffer
        self._is_held = True
        self.handle = Handle(*handle)
        """Names the group in other processes: `TrajectoryBuffer.view`."""
        self.index = index
        """k: number of the group's admission."""
        self.prompt_index = prompt_index
        self.min_version = min_version
        """Oldest policy version among its tokens."""
        self.max_version = max_version
        self.payload = payload
        """[num_bytes] uint8, read-only, in shared memory: valid until the lease ends."""
        self.segments = segments
        """[M, 2] int64, read-only: rows (token_start, policy_version); valid like the payload."""

    def group(self) -> PromptGroup:
        """The group that `put_group` stored; its arrays are views, valid until the lease ends."""
        return read_group(self.payload)

    def release(self, outcome: Literal["trained", "rejected"]) -> None:
        """Frees the memory; the credit stays out until `set_version` of the next cut version."""
        self._buffer.release(self, outcome)

    def evict(self, cause: str, *, requeue: bool) -> None:
        """Gives memory and credit back and leaves the order; see `TrajectoryBuffer.evict`."""
        self._buffer.evict(self, cause, requeue=requeue)

    def put_back(self) -> None:
        """Makes the group ready again, at its old place in the order."""
        self._buffer.put_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._is_held:
            self.put_back()

    def __repr__(self) -> str:
        return (
            f"<Lease of group {self.index}: prompt {self.prompt_index}, {self.payload.size} bytes, "
            f"versions {self.min_version} to {self.max_version}>"
        )


class TrajectoryBuffer:
    """Prompt groups in admission order, at most `num_slots` of them between admission and credit.

    Every method may be called from any thread of any attached process. Waits release the GIL, let
    signals through within 50 ms, and raise BufferTimeout at their deadline and BufferClosed once
    any process closes the buffer.
    """

    def __init__(self, native: _buffer.Buffer, name: str, *, is_owner: bool) -> None:
        """Use `create` or `attach`."""
        self._native = native
        self._is_owner = is_owner
        self.name = name
        """What `attach` takes."""
        self.num_slots = native.num_slots
        """C = floor((1 + s) * groups_per_version): slot credits."""
        self.max_staleness = native.staleness_bound
        """floor((C + lookahead - 1) / groups_per_version): bound on a taken token's staleness.

        Proved for a trainer that cuts a version each time it has released groups_per_version more
        groups, neither sooner nor later.
        """
        self.staleness_threshold = native.staleness_threshold
        self.groups_per_version = native.groups_per_version
        self.lookahead = native.lookahead

    @classmethod
    def create(
        cls,
        name: str,
        *,
        staleness_threshold: float,
        groups_per_version: int,
        lookahead: int = 0,
        capacity_bytes: int,
        first_prompt_index: int = 0,
    ) -> Self:
        """A new buffer in /dev/shm/asyncrl-<name>, readable by this user only.

        staleness_threshold: s >= 0, any real. groups_per_version: groups the trainer consumes for
        each version it cuts. lookahead: W, how far past the oldest untaken group a ready one may
        overtake. capacity_bytes: memory for payloads, allocated at once. first_prompt_index: where
        the prompt stream goes on.

        Raises BufferExists, BufferNoMemory, ValueError.
        """
        name = name.removeprefix(_PREFIX)
        native = _buffer.Buffer.create(
            name,
            staleness_threshold=staleness_threshold,
            groups_per_version=groups_per_version,
            lookahead=lookahead,
            capacity_bytes=capacity_bytes,
            first_prompt_index=first_prompt_index,
        )
        return cls(native, name, is_owner=True)

    @classmethod
    def attach(cls, name: str) -> Self:
        """The buffer that another process created; raises BufferNotFound or BufferForeign."""
        name = name.removeprefix(_PREFIX)
        return cls(_buffer.Buffer.attach(name), name, is_owner=False)

    def admit(self, timeout_s: float) -> Ticket:
        """Takes a slot credit and the next prompt. Waits for: a credit; freed by `set_version`,
        `withdraw` and `evict`."""
        return _ticket(_there(self._native.admit(max(timeout_s, 0.0))))

    async def admit_async(self, timeout_s: float) -> Ticket:
        """`admit` for asyncio; a cancelled call has taken nothing."""
        return _ticket(await self._until(timeout_s, "freed", self._native.admit))

    def reserve(
        self, ticket: Ticket, num_bytes: int, *, max_segments: int = 64, timeout_s: float = 10.0
    ) -> NDArray[np.uint8]:
        """[num_bytes] uint8 of shared memory to write the payload into, until `publish`.

        max_segments: most rows that `publish` will be given. Waits for: memory; freed by `release`,
        `withdraw` and `evict`. The oldest untaken group evicts the youngest ready ones (cause
        "memory", their prompts are admitted again) rather than wait for groups that wait for it.
        Raises ValueError when the payload can never fit.
        """
        return _there(
            self._native.reserve(ticket.handle, num_bytes, max_segments, max(timeout_s, 0.0))
        )

    def publish(self, ticket: Ticket, segments: NDArray[np.int64]) -> None:
        """Makes the reserved payload ready to take; it must not be written any more.

        segments: [M, 2] int64 rows (token_start, policy_version) over the group's concatenated
        completion tokens, starts rising from 0.
        """
        self._native.publish(ticket.handle, segments)

    def put_group(self, ticket: Ticket, group: PromptGroup, *, timeout_s: float = 10.0) -> None:
        """Reserve, write and publish in one."""
        segments = version_segments(group.token_versions())
        payload = self.reserve(
            ticket, group_num_bytes(group), max_segments=len(segments), timeout_s=timeout_s
        )
        write_group(group, payload)
        self.publish(ticket, segments)

    async def put_group_async(self, ticket: Ticket, group: PromptGroup, timeout_s: float) -> None:
        """`put_group` for asyncio: other rollouts of this process go on while it waits for memory.

        A cancelled call leaves the ticket unused.
        """
        segments = version_segments(group.token_versions())
        num_bytes = group_num_bytes(group)
        payload = await self._until(
            timeout_s,
            "freed",
            lambda wait_s: self._native.reserve(ticket.handle, num_bytes, len(segments), wait_s),
        )
        write_group(group, payload)
        self.publish(ticket, segments)

    def withdraw(self, ticket: Ticket, cause: str) -> None:
        """Gives an unpublished group's credit back; it leaves the order, later groups move up.

        cause: "filtered" or "failed".
        """
        self._native.withdraw(ticket.handle, cause)

    def take(self, timeout_s: float) -> Lease:
        """The next group in admission order, or one that may overtake it. Waits for: `publish`."""
        return Lease(self, _there(self._native.take(max(timeout_s, 0.0))))

    async def take_async(self, timeout_s: float) -> Lease:
        """`take` for asyncio; a cancelled call has taken nothing."""
        return Lease(self, await self._until(timeout_s, "published", self._native.take))

    def take_many(self, num_groups: int, timeout_s: float) -> list[Lease]:
        """`num_groups` leases, filled one at a time; on any error all are put back.

        Wakes up once for all groups that are still missing, not for each.
        """
        deadline = time.monotonic() + timeout_s
        leases: list[Lease] = []
        try:
            while (num_missing := num_groups - len(leases)) > 0:
                left = max(deadline - time.monotonic(), 0.0)
                leases.append(Lease(self, _there(self._native.take(left, num_missing))))
        except BaseException:
            for lease in leases:
                lease.put_back()
            raise
        return leases

    def put_back(self, lease: Lease) -> None:
        """Undoes a take: the group is ready again, at its old place in the order."""
        self._native.put_back(lease.handle)
        lease._is_held = False

    def release(self, lease: Lease, outcome: Literal["trained", "rejected"]) -> None:
        """Ends a lease whose group was used up: its memory is free.

        Its credit stays out until `set_version` of the version that is cut next.
        """
        self._native.release(lease.handle, outcome)
        lease._is_held = False

    def evict(self, lease: Lease, cause: str, *, requeue: bool) -> None:
        """Ends a lease whose group is not used: memory and credit are free, it leaves the order.

        cause: "stale" or "unwanted", counted as `num_evicted_<cause>`. requeue: its prompt is
        admitted again, before new ones.
        """
        self._native.evict(lease.handle, cause, requeue)
        lease._is_held = False

    def view(self, handle: Handle) -> NDArray[np.uint8]:
        """[num_bytes] uint8, the read-only payload of a lease that another process holds.

        Valid while that process holds it; BufferStaleHandle once it no longer does.
        """
        return self._native.view(handle)[5]

    def cut_version(self, version: int) -> None:
        """The trainer made `version` (its current + 1) of all groups released so far."""
        self._native.cut_version(version)

    def set_version(self, version: int) -> None:
        """All engines hold `version`: credits of groups it was trained on are free. Idempotent."""
        self._native.set_version(version)

    def staleness(self, lease: Lease) -> int:
        """Trainer's version now minus the group's oldest."""
        return self.stats()["trainer_version"] - lease.min_version

    def segment_staleness(self, lease: Lease) -> NDArray[np.int64]:
        """[M] int64: trainer's version now minus each segment's."""
        return self.stats()["trainer_version"] - lease.segments[:, 1]

    def reclaim(self) -> int:
        """Takes back what dead processes hold; returns the number of slots changed.

        A group that was not yet published is evicted (cause "abandoned") and its prompt admitted
        again; a lease is put back. Every wait does this too, at least each 50 ms.
        """
        return self._native.reclaim()

    def stats(self) -> dict[str, int]:
        """Counters: groups by outcome and state, bytes, versions, staleness.

        Each slot is counted at one moment, so that the books balance whenever they are read.
        """
        return self._native.stats()

    def assert_books_balance(self) -> None:
        """BooksDoNotBalance unless each admitted group has one outcome or sits in one slot."""
        stats = self.stats()
        total = sum(stats[f"num_{outcome}"] for outcome in _OUTCOMES)
        if total != stats["num_admitted"]:
            raise BooksDoNotBalance(
                f"num_admitted={stats['num_admitted']} groups, but {total} are "
                f"{' + '.join(_OUTCOMES)}; all counters: {stats}"
            )

    def close(self) -> None:
        """Ends the buffer for all processes: waiters wake with BufferClosed; leases may still end.

        Nothing after `detach`.
        """
        if self._native.is_attached:
            self._native.close()

    def detach(self) -> None:
        """Lets this object go of the memory; arrays from it keep the mapping alive."""
        self._native.detach()

    def unlink(self) -> None:
        """Removes the name; the memory is freed when the last process detaches. Idempotent."""
        _buffer.unlink(self.name)

    @property
    def is_closed(self) -> bool:
        """Whether `close` or `detach` was called."""
        return not self._native.is_attached or self._native.is_closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Detaches; the creator's object also closes and unlinks."""
        if self._is_owner:
            self.close()
            self.unlink()
        self.detach()

    def __repr__(self) -> str:
        state = self._native.describe() if self._native.is_attached else "detached"
        return f"<TrajectoryBuffer {self.name!r}{', closed' * self.is_closed}: {state}>"

    async def _until(
        self,
        timeout_s: float,
        event: Literal["published", "freed"],
        attempt: Callable[[float], _T | None],
    ) -> _T:
        # Only the wait runs in a thread. It takes nothing, so cancelling it can lose nothing.
        native = self._native
        wait = native.wait_published if event == "published" else native.wait_freed
        deadline = time.monotonic() + timeout_s
        while True:
            seen = 0
            if native.is_attached:
                seen = native.num_published if event == "published" else native.num_freed
            is_last = time.monotonic() >= deadline
            result = attempt(0.0 if is_last else _NO_WAIT)
            if result is not None:
                return result
            await asyncio.to_thread(wait, seen)


def _ticket(ticket: _buffer._Ticket) -> Ticket:
    handle, index, prompt_index, policy_version = ticket
    return Ticket(Handle(*handle), index, prompt_index, policy_version)


def _there(result: _T | None) -> _T:
    assert result is not None  # None only comes back from calls that do not wait
    return result


def _main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.buffer", description=__doc__)
    parser.add_argument("name", help="the buffer's name, or its file in /dev/shm")
    name = os.path.basename(parser.parse_args(arguments).name)
    try:
        buffer = TrajectoryBuffer.attach(name)
    except TrajectoryBufferError as error:
        print(error, file=sys.stderr)
        return 1
    print(buffer)
    for key, value in buffer.stats().items():
        print(f"{key:24} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
