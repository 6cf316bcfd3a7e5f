"""What is in flight is worked off in order, bounds its maker, and waits out a setback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.errors import StoreError, WrongStateError
from etude.trainer.controller.publishing.in_flight import InFlightQueue


class Setback(Exception):  # noqa: N818 - a word of the module that is tested
    """What the maker overcomes."""


class Worker:
    """Does what it is let to, and fails where it is told to."""

    def __init__(
        self, queue: InFlightQueue[int], failing: dict[int, Exception] | None = None
    ) -> None:
        self.queue = queue
        self.failing = failing or {}
        self.done: list[int] = []
        self.most = 0
        self.allowed = asyncio.Semaphore(0)

    async def work(self, item: int) -> None:
        self.most = max(self.most, len(self.queue))
        await self.allowed.acquire()
        if item in self.failing:
            raise self.failing.pop(item)
        self.done.append(item)

    def let(self, count: int) -> None:
        for _ in range(count):
            self.allowed.release()


@asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(worker.queue.run(worker.work))
        yield
        task.cancel()


async def rest() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def handed_over(queue: InFlightQueue[int], most: int) -> list[int]:
    """As a maker waits who hands over again what met a setback; what that was."""
    met: list[int] = []
    while True:
        try:
            await queue.wait_for_room(most)
        except Setback:
            first, *others = queue.withdraw()
            met.append(first)
            for each in (first, *others):
                queue.add(each)
        else:
            return met


async def made(queue: InFlightQueue[int], count: int, bound: int) -> list[int]:
    """Hand over so many, and wait for the last."""
    met: list[int] = []
    for item in range(count):
        queue.add(item)
        met += await handed_over(queue, bound)
    return met + await handed_over(queue, 0)


@given(
    bound=st.integers(0, 8),
    lets=st.lists(st.integers(0, 4), max_size=30),
    setbacks=st.sets(st.integers(0, 19)),
)
def test_everything_is_done_once_and_in_order_and_no_more_waits_than_the_bound_and_one(
    bound: int, lets: list[int], setbacks: set[int]
) -> None:
    async def scenario() -> None:
        queue: InFlightQueue[int] = InFlightQueue((Setback,))
        worker = Worker(queue, {item: Setback() for item in setbacks})
        async with working(worker):
            maker = asyncio.create_task(made(queue, 20, bound))
            for count in [*lets, 100]:
                worker.let(count)
                await rest()
                assert len(queue) <= bound + 1
            met = await maker
        assert worker.done == list(range(20))
        assert met == sorted(setbacks)
        assert worker.most <= bound + 1

    asyncio.run(scenario())


async def test_a_maker_waits_until_there_is_room() -> None:
    queue: InFlightQueue[int] = InFlightQueue()
    worker = Worker(queue)
    async with working(worker):
        for item in range(3):
            queue.add(item)
        await queue.wait_for_room(3)
        waiting = asyncio.create_task(queue.wait_for_room(2))
        drained = asyncio.create_task(queue.wait_for_room(0))
        await rest()
        assert not waiting.done()
        worker.let(1)
        await waiting
        await rest()
        assert not drained.done()
        worker.let(2)
        await drained
    assert worker.done == [0, 1, 2]


async def test_a_setback_stops_the_work_until_everything_is_withdrawn() -> None:
    queue: InFlightQueue[int] = InFlightQueue((Setback,))
    heard: list[int] = []
    queue.on_change = lambda: heard.append(len(queue))
    worker = Worker(queue, {1: Setback("no")})
    async with working(worker):
        for item in range(4):
            queue.add(item)
        worker.let(10)
        for most in (0, 8):  # whoever asks is told, as long as it is not overcome
            with pytest.raises(Setback, match="no"):
                await queue.wait_for_room(most)
            assert queue.has_setback
        assert worker.done == [0]
        assert queue.withdraw() == [1, 2, 3]
        assert (len(queue), queue.newest, queue.has_setback) == (0, None, False)
        queue.add(7)
        await queue.wait_for_room(0)
    assert worker.done == [0, 7]
    assert heard == [3, 3, 0]


async def test_what_may_be_half_done_is_not_withdrawn() -> None:
    queue: InFlightQueue[int] = InFlightQueue()
    queue.add(1)
    with pytest.raises(WrongStateError):
        queue.withdraw()
    assert queue.newest == 1


async def test_any_other_failure_ends_the_worker() -> None:
    queue: InFlightQueue[int] = InFlightQueue((Setback,))
    worker = Worker(queue, {0: StoreError("away")})
    queue.add(0)
    worker.let(1)
    with pytest.raises(StoreError, match="away"):
        await queue.run(worker.work)
