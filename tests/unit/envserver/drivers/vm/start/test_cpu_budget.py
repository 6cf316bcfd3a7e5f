"""How fast a node starts machines, and in which order."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from typing_extensions import override

from etude.envserver.drivers.vm.start.cpu_budget import (
    ESTIMATES_MS,
    StartCosts,
    StartQueue,
    StartWork,
    full_bucket,
    start_wait_s,
)

works = st.sampled_from([*StartWork])
MACHINES = {StartWork.BOOT, StartWork.RESTORE, StartWork.SPAWN}
"""Work that makes one machine more."""


@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.floats(0, 5), works), min_size=1, max_size=60),
)
def test_no_span_of_time_has_more_than_its_share_and_one_burst(
    cores: int, steps: list[tuple[float, StartWork]]
) -> None:
    bucket, now_s, spent = full_bucket(cores), 0.0, []
    for later_s, work in steps:
        now_s += later_s
        bucket = bucket.refill(now_s)
        if start_wait_s(bucket, ESTIMATES_MS[work]) == 0:
            bucket = bucket.take(ESTIMATES_MS[work])
            spent.append((now_s, ESTIMATES_MS[work]))
    largest = max((cost for _, cost in spent), default=0.0)
    for index, (begin_s, _) in enumerate(spent):
        total = 0.0
        for at_s, cost in spent[index:]:
            total += cost
            allowed = cores * (900 * (at_s - begin_s) + 100)
            # What is dearer than a burst overdraws by itself.
            assert total <= allowed + largest + 1e-6


@given(st.integers(1, 8), works)
def test_whoever_waits_as_long_as_was_said_can_pay(cores: int, work: StartWork) -> None:
    bucket = full_bucket(cores).take(ESTIMATES_MS[StartWork.BOOT])
    wait_s = start_wait_s(bucket, ESTIMATES_MS[work])
    assert start_wait_s(bucket.refill(wait_s + 1e-9), ESTIMATES_MS[work]) < 1e-6


@given(st.lists(st.floats(1, 1000), min_size=1))
def test_estimates_give_way_to_what_was_measured(measured: list[float]) -> None:
    costs = StartCosts()
    assert costs.estimate_ms(StartWork.RESTORE) == 45
    for cpu_ms in measured:
        costs.add_measurement(StartWork.RESTORE, cpu_ms)
    assert min(measured) - 1e-6 <= costs.estimate_ms(StartWork.RESTORE) <= max(measured) + 1e-6
    assert costs.estimate_ms(StartWork.SHELL) == 25


class Queueing(RuleBasedStateMachine):
    """Waiters that come, leave and end in any order, on a clock that goes on as it likes."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.line = StartQueue(max_concurrent=2, room=3, bucket=full_bucket(2))
        self.now_s = 0.0
        self.waiting: dict[int, tuple[StartWork, bool]] = {}
        self.running: dict[int, StartWork] = {}
        self.machines = 0
        self.count = 0

    @rule(target=tickets, work=works, is_urgent=st.booleans())
    def ask(self, work: StartWork, *, is_urgent: bool) -> int:
        self.count += 1
        self.line.enqueue(self.count, work, is_urgent=is_urgent)
        self.waiting[self.count] = (work, is_urgent)
        return self.count

    @rule(ticket=tickets)
    def leave(self, ticket: int) -> None:
        self.line.dequeue(ticket)
        self.waiting.pop(ticket, None)

    @rule(later_s=st.floats(0, 3))
    def admit(self, later_s: float) -> None:
        self.now_s += later_s
        admission = self.line.admit(now_s=self.now_s)
        for ticket in admission.tickets:
            work, is_urgent = self.waiting.pop(ticket)
            self.running[ticket] = work
            earlier = [each for each in self.waiting.items() if each[0] < ticket]
            for _, (other, other_is_urgent) in earlier:
                # Only who needs room for a machine is overtaken by an equal.
                overtaken = other_is_urgent is is_urgent or (other_is_urgent and not is_urgent)
                assert not overtaken or other in MACHINES
        if admission.again_s is not None:
            assert admission.again_s > 0

    @rule(data=st.data(), is_kept=st.booleans())
    def end(self, data: st.DataObject, *, is_kept: bool) -> None:
        if self.running:
            ticket = data.draw(st.sampled_from(sorted(self.running)))
            work = self.running.pop(ticket)
            if work in MACHINES and is_kept:
                self.line.live += 1
                self.machines += 1
            self.line.finish(work)

    @rule()
    def stop_a_machine(self) -> None:
        if self.machines:
            self.machines -= 1
            self.line.live -= 1

    @invariant()
    def there_are_no_more_than_lanes_and_room(self) -> None:
        assert self.line.busy == len(self.running) <= 2
        making = sum(work in MACHINES for work in self.running.values())
        assert self.machines + making <= 3

    @override
    def teardown(self) -> None:
        """Everybody is served or gone in the end: nothing is left behind."""
        for ticket in [*self.waiting]:
            self.line.dequeue(ticket)
        for work in self.running.values():
            self.line.finish(work)
        self.line.live = 0
        assert self.line.busy == 0
        self.line.enqueue(0, StartWork.BOOT, is_urgent=False)
        assert self.line.admit(now_s=self.now_s + 1e6) == ((0,), None)


TestQueueing = Queueing.TestCase


@given(works, works)
def test_what_was_not_done_after_all_costs_nothing(one: StartWork, other: StartWork) -> None:
    line = StartQueue(max_concurrent=1, room=9, bucket=full_bucket(1))
    line.enqueue(1, one, is_urgent=True)
    before = line.bucket
    assert line.admit(now_s=0.0).tickets == (1,)
    line.refund(one)
    assert line.bucket == before
    line.enqueue(2, other, is_urgent=True)
    assert line.admit(now_s=0.0).tickets == (2,)


def test_a_start_that_somebody_waits_for_comes_before_one_done_ahead() -> None:
    line = StartQueue(max_concurrent=1, room=9, bucket=full_bucket(1))
    line.enqueue(1, StartWork.SPAWN, is_urgent=False)
    line.enqueue(2, StartWork.SHELL, is_urgent=True)
    assert line.admit(now_s=0.0).tickets == (2,)


def test_a_host_without_room_says_so_and_hands_out_what_it_has() -> None:
    line = StartQueue(max_concurrent=2, room=1, bucket=full_bucket(2), live=1)
    line.enqueue(1, StartWork.RESTORE, is_urgent=True)
    line.enqueue(2, StartWork.PAUSED_CLONE, is_urgent=True)
    assert line.admit(now_s=0.0).tickets == (2,)
    assert line.is_crowded
    line.live = 0
    assert line.admit(now_s=0.0).tickets == (1,)
    assert not line.is_crowded
