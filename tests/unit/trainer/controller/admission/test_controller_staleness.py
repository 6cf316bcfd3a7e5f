"""The staleness bound holds for any schedule of rollouts and publications."""

import heapq
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from etude.trainer.controller.admission.deadlines import DeadlineIndex, GroupDeadline
from etude.trainer.controller.admission.staleness import StalenessBound


def test_sync_admits_one_batch_and_no_more() -> None:
    bound = StalenessBound(groups_per_step=4, max_staleness=0)
    assert [bound.can_admit(i, serving=0) for i in range(6)] == [True] * 4 + [False] * 2
    assert bound.can_admit(4, serving=1)


def test_a_bound_of_two_admits_three_batches() -> None:
    bound = StalenessBound(groups_per_step=2, max_staleness=2)
    assert sum(bound.can_admit(i, serving=0) for i in range(20)) == 6


def test_a_rollout_staler_than_the_limit_is_late() -> None:
    bound = StalenessBound(groups_per_step=1, max_staleness=1)
    assert not bound.is_late(bound.deadline(3), trainer=4)
    assert bound.is_late(bound.deadline(3), trainer=5)


def test_a_version_of_several_steps_admits_their_batches_and_ages_all_of_them_at_once() -> None:
    bound = StalenessBound(groups_per_step=2, max_staleness=0, steps_per_version=3)
    assert sum(bound.can_admit(i, serving=0) for i in range(20)) == 6
    assert [bound.is_late(bound.deadline(0), trainer=step) for step in range(4)] == [
        *(False, False, False),
        True,
    ]
    assert [bound.staleness(0, trainer=step) for step in (2, 3, 6)] == [0, 1, 2]


@dataclass
class Simulation:
    """A controller with the real rules over made-up durations."""

    bound: StalenessBound
    durations: list[int]
    publish_delay: int
    steps: int
    clock: int = 0
    trainer: int = 0
    serving: int = 0
    admitted: int = 0
    dropped: int = 0
    running: list[tuple[int, int]] = field(default_factory=list)
    oldest: dict[int, int] = field(default_factory=dict)
    index: DeadlineIndex = field(init=False)
    publications: list[tuple[int, int]] = field(default_factory=list)
    worst: int = 0
    extra: frozenset[int] = frozenset()
    """Steps after which a version is published though none is due."""

    def __post_init__(self) -> None:
        self.index = DeadlineIndex(self.bound)

    def run(self) -> None:
        while self.trainer < self.steps:
            self.admit()
            if self.train():
                continue
            assert self.running or self.publications, "deadlock"
            self.advance()

    def admit(self) -> None:
        while self.bound.can_admit(self.admitted - self.dropped, serving=self.serving):
            index = self.admitted
            self.admitted += 1
            self.oldest[index] = self.serving
            duration = self.durations[index % len(self.durations)]
            heapq.heappush(self.running, (self.clock + duration, index))
            self.put(index, is_ready=False)

    def put(self, index: int, *, is_ready: bool) -> None:
        deadline = self.bound.deadline(self.oldest[index])
        self.index.insert(str(index), GroupDeadline(deadline, index, is_ready))

    def train(self) -> bool:
        batch = self.index.pick(trainer=self.trainer)
        if batch is None:
            return False
        assert len(batch) == self.bound.groups_per_step
        for index in map(int, batch):
            every = self.bound.steps_per_version
            age = self.trainer // every - self.oldest[index] // every
            self.worst = max(self.worst, age)
            self.index.discard(str(index))
        self.trainer += 1
        if self.trainer % self.bound.steps_per_version == 0 or self.trainer in self.extra:
            self.publications.append((self.clock + self.publish_delay, self.trainer))
        return True

    def advance(self) -> None:
        times = [t for t, _ in self.publications] + ([self.running[0][0]] if self.running else [])
        self.clock = min(times)
        for time, version in list(self.publications):
            if time <= self.clock:
                self.serving = max(self.serving, version)
                self.publications.remove((time, version))
        while self.running and self.running[0][0] <= self.clock:
            self.put(heapq.heappop(self.running)[1], is_ready=True)


@settings(max_examples=300)
@given(
    groups_per_step=st.integers(1, 6),
    max_staleness=st.integers(0, 4),
    durations=st.lists(st.integers(1, 200), min_size=1, max_size=60),
    publish_delay=st.integers(0, 30),
    steps_per_version=st.integers(1, 5),
    extra=st.frozensets(st.integers(1, 25), max_size=4),
)
def test_no_schedule_exceeds_the_bound_or_stops(
    groups_per_step: int,
    max_staleness: int,
    durations: list[int],
    publish_delay: int,
    steps_per_version: int,
    extra: frozenset[int],
) -> None:
    bound = StalenessBound(
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        steps_per_version=steps_per_version,
    )
    simulation = Simulation(bound, durations, publish_delay, steps=25, extra=extra)
    simulation.run()
    assert simulation.worst <= max_staleness


def test_taking_groups_in_finish_order_alone_breaks_the_bound() -> None:
    # The second half of the batch rule is what the bound rests on: without it this fails.
    bound = StalenessBound(groups_per_step=1, max_staleness=1)
    simulation = Simulation(bound, [1000] + [1] * 20, publish_delay=0, steps=20)
    simulation.run()
    assert simulation.worst <= 1
