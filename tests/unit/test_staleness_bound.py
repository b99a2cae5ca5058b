"""The proved staleness bound, through the real buffer: random settings, durations and schedules."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass, field

import numpy as np

from asyncrl.buffer import BufferTimeout, Lease, Ticket, TrajectoryBuffer

_NUM_RUNS = 150


@dataclass
class Simulation:
    """Engines, trainer and publisher of one run, one random action at a time."""

    random: random.Random
    buffer: TrajectoryBuffer
    groups_per_step: int
    steps_per_version: int
    leave_rate: float
    """Share of groups that are withdrawn, and of leases that are evicted."""
    eagerness: float
    """How much likelier admission and generation are than training and publishing."""
    writing: list[Ticket] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    num_steps: int = 0
    trainer_version: int = 0
    engine_version: int = 0
    staleness: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    def run(self, num_versions: int) -> None:
        generation = [self.admit, self.finish]
        training = [self.take, self.load]
        while self.engine_version < num_versions:
            first, second = (
                (generation, training)
                if self.random.random() < self.eagerness
                else (training, generation)
            )
            actions = [*self.shuffled(first), *self.shuffled(second)]
            assert any(action() for action in actions), f"deadlock: {self.buffer!r}"

    def shuffled(self, actions: list) -> list:
        return self.random.sample(actions, len(actions))

    def admit(self) -> bool:
        try:
            ticket = self.buffer.admit(0)
        except BufferTimeout:
            return False
        assert ticket.policy_version == self.engine_version
        self.writing.append(ticket)
        return True

    def finish(self) -> bool:
        """The group that ends is seldom the oldest: durations differ widely."""
        if not self.writing:
            return False
        n = len(self.writing)
        ticket = self.writing.pop(int(n * self.random.random() ** 0.5))
        if self.random.random() < self.leave_rate:
            self.buffer.withdraw(ticket, self.random.choice(["filtered", "failed"]))
            return True
        self.buffer.reserve(ticket, 16, timeout_s=0)
        segments = [[0, ticket.policy_version]]
        if self.engine_version > ticket.policy_version:
            segments.append([5, self.engine_version])
        self.buffer.publish(ticket, np.array(segments))
        return True

    def take(self) -> bool:
        try:
            lease = self.buffer.take(0)
        except BufferTimeout:
            return False
        self.staleness.append(self.buffer.staleness(lease))
        if self.random.random() < self.leave_rate:
            lease.evict("stale", requeue=True)
            return True
        self.prompts.append(lease.prompt_index)
        self.leases.append(lease)
        if len(self.leases) == self.groups_per_step:
            self.step()
        return True

    def step(self) -> None:
        for lease in self.leases:
            lease.release(self.random.choice(["trained", "rejected"]))
        self.leases = []
        self.num_steps += 1
        if self.num_steps % self.steps_per_version == 0:
            self.trainer_version += 1
            self.buffer.cut_version(self.trainer_version)

    def load(self) -> bool:
        """Engines load the newest version, which may not be the next."""
        if self.engine_version == self.trainer_version:
            return False
        self.engine_version = self.trainer_version
        self.buffer.set_version(self.engine_version)
        self.buffer.assert_books_balance()
        return True


def _simulate(seed: int, *, leave_rate: float) -> tuple[int, int, int]:
    """(largest staleness, bound, lookahead) of one random run."""
    chance = random.Random(seed)
    groups_per_step, steps_per_version = chance.randint(1, 4), chance.randint(1, 3)
    groups_per_version = groups_per_step * steps_per_version
    threshold = chance.choice([0.0, 1.0, chance.uniform(0, 1), chance.uniform(0, 4)])
    lookahead = chance.choice([0, 0, 1, chance.randint(2, 12)])
    with TrajectoryBuffer.create(
        f"test-{uuid.uuid4().hex}",
        staleness_threshold=threshold,
        groups_per_version=groups_per_version,
        lookahead=lookahead,
        capacity_bytes=1 << 18,
    ) as buffer:
        simulation = Simulation(
            chance,
            buffer,
            groups_per_step,
            steps_per_version,
            leave_rate,
            eagerness=chance.choice([0.3, 0.6, 0.95]),
        )
        simulation.run(num_versions=12)
        num_slots = int((1 + threshold) * groups_per_version)
        assert buffer.num_slots == num_slots
        assert buffer.max_staleness == (num_slots + lookahead - 1) // groups_per_version
        assert max(simulation.staleness) == buffer.stats()["max_staleness_seen"]
        assert len(set(simulation.prompts)) == len(simulation.prompts)
        if lookahead == 0 and leave_rate == 0:
            assert simulation.prompts == list(range(len(simulation.prompts)))
        return max(simulation.staleness), buffer.max_staleness, lookahead


def test_no_schedule_passes_the_bound_and_some_meet_it() -> None:
    results = [_simulate(seed, leave_rate=0.0) for seed in range(_NUM_RUNS)]
    assert all(seen <= bound for seen, bound, _ in results)
    assert sum(seen == bound for seen, bound, _ in results) > _NUM_RUNS / 2
    assert any(seen == bound > 1 and lookahead > 0 for seen, bound, lookahead in results)


def test_groups_that_leave_the_order_do_not_break_the_bound() -> None:
    results = [_simulate(seed, leave_rate=0.2) for seed in range(_NUM_RUNS)]
    assert all(seen <= bound for seen, bound, _ in results)
    assert any(seen == bound > 0 for seen, bound, _ in results)
