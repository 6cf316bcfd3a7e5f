"""One replica acts: leases, take-over, the write gate."""

import asyncio

import pytest
from typing_extensions import override

from etude.operator.clock import ManualClock
from etude.operator.controller.leader_election import (
    ATTEMPT_LIMIT_S,
    RENEW_DEADLINE_S,
    RETRY_S,
    LeaderElector,
)
from etude.operator.kube.leases import DURATION_S, LeaderLease, MemoryLeaseStore


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def leases() -> MemoryLeaseStore:
    return MemoryLeaseStore()


def candidate(leases: MemoryLeaseStore, clock: ManualClock, name: str) -> LeaderElector:
    return LeaderElector(leases, clock, name)


async def test_the_first_candidate_leads_and_the_second_does_not(
    leases: MemoryLeaseStore, clock: ManualClock
) -> None:
    first, second = candidate(leases, clock, "a"), candidate(leases, clock, "b")
    assert await first.campaign()
    assert not await second.campaign()
    assert first.may_write()
    assert not second.may_write()


async def test_a_leader_that_falls_silent_is_replaced_after_the_duration_as_seen_here(
    leases: MemoryLeaseStore, clock: ManualClock
) -> None:
    first, second = candidate(leases, clock, "a"), candidate(leases, clock, "b")
    await first.campaign()
    assert not await second.campaign()
    clock.advance(DURATION_S)
    assert not await second.campaign()
    clock.advance(0.1)
    assert await second.campaign()
    assert leases.record is not None
    assert (leases.record.holder, leases.record.transitions) == ("b", 1)


async def test_a_process_that_was_stopped_finds_its_gate_closed(
    leases: MemoryLeaseStore, clock: ManualClock
) -> None:
    first, second = candidate(leases, clock, "a"), candidate(leases, clock, "b")
    await first.campaign()
    await second.campaign()
    clock.advance(120)
    await second.campaign()
    assert not first.may_write()
    assert second.may_write()
    assert not await first.campaign()


async def test_the_gate_closes_before_the_lease_can_expire(
    leases: MemoryLeaseStore, clock: ManualClock
) -> None:
    leader = candidate(leases, clock, "a")
    await leader.campaign()
    clock.advance(RENEW_DEADLINE_S - 0.1)
    assert leader.may_write()
    clock.advance(0.1)
    assert not leader.may_write()
    assert RENEW_DEADLINE_S < DURATION_S


async def test_a_lease_counts_from_when_it_was_asked_for(clock: ManualClock) -> None:
    class Slow(MemoryLeaseStore):
        """Its answer takes a while, in which others may have seen the record already."""

        @override
        async def write(self, record: LeaderLease) -> LeaderLease:
            written = await MemoryLeaseStore.write(self, record)
            clock.advance(2.0)
            return written

    leader = candidate(Slow(), clock, "a")
    await leader.campaign()
    clock.advance(RENEW_DEADLINE_S - 2.1)
    assert leader.may_write()
    clock.advance(0.1)
    assert not leader.may_write()


async def test_the_lease_of_another_counts_from_when_it_was_read(clock: ManualClock) -> None:
    class SlowAtFirst(MemoryLeaseStore):
        """The other one renews while the first request is under way."""

        @override
        async def read(self) -> LeaderLease | None:
            if self.record is None:
                clock.advance(ATTEMPT_LIMIT_S)
                self.record = LeaderLease("a", DURATION_S, 0, "7")
            return self.record

    second = candidate(SlowAtFirst(), clock, "b")
    assert not await second.campaign()
    renewed_s = clock.monotonic_s()
    while not await second.campaign():
        clock.advance(0.1)
    assert clock.monotonic_s() - renewed_s > DURATION_S


def test_one_attempt_that_hangs_leaves_time_for_another_before_the_gate_closes() -> None:
    assert RETRY_S + 2 * ATTEMPT_LIMIT_S <= RENEW_DEADLINE_S
    assert ATTEMPT_LIMIT_S >= RETRY_S, "else the pause after it counts too"


async def test_a_renewal_that_fails_for_a_while_does_not_end_the_leadership(
    leases: MemoryLeaseStore, clock: ManualClock
) -> None:
    leader = candidate(leases, clock, "a")
    await leader.campaign()
    leases.is_down = True
    clock.advance(5)
    assert await leader.campaign()
    clock.advance(3)
    assert not await leader.campaign()
    leases.is_down = False
    assert await leader.campaign()


async def test_a_released_lease_is_taken_at_once(
    leases: MemoryLeaseStore, clock: ManualClock
) -> None:
    first, second = candidate(leases, clock, "a"), candidate(leases, clock, "b")
    await first.campaign()
    await first.release()
    assert not first.may_write()
    assert await second.campaign()


async def test_a_restarted_container_takes_its_own_lease_back_at_once(
    leases: MemoryLeaseStore, clock: ManualClock
) -> None:
    await candidate(leases, clock, "a").campaign()
    assert await candidate(leases, clock, "a").campaign()
    assert leases.record is not None
    assert leases.record.transitions == 0


async def test_of_two_that_see_an_expired_lease_one_wins(
    leases: MemoryLeaseStore, clock: ManualClock
) -> None:
    leases.record = LeaderLease("gone", version="0")
    rivals = [candidate(leases, clock, name) for name in "abc"]
    for rival in rivals:
        await rival.campaign()
    clock.advance(DURATION_S + 1)
    assert sorted([await rival.campaign() for rival in rivals]) == [False, False, True]


async def test_work_runs_only_while_leading(leases: MemoryLeaseStore, clock: ManualClock) -> None:
    leader = candidate(leases, clock, "a")
    began, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        leading = group.create_task(leader.lead(work))
        await began.wait()
        leases.record = LeaderLease("b", version="x")
        clock.advance(RENEW_DEADLINE_S + 1)
        await ended.wait()
        leading.cancel()
