"""Waiting for a turn, and for a place to run."""

import asyncio
import random

import pytest

from etude.envserver.drivers.vm.start.cpu_budget import StartWork
from etude.envserver.drivers.vm.start.start_scheduler import RunSlots, StartScheduler


def lanes(cores: int = 1) -> StartScheduler:
    """With a clock that fills the budget faster than any test spends it."""
    ticks = iter(range(10**9))
    return StartScheduler(cores=cores, room=100, clock=lambda: float(next(ticks)))


async def test_turns_come_in_the_order_of_asking() -> None:
    made, order = lanes(), []

    async def work(number: int) -> None:
        async with made.acquire_start(StartWork.SHELL):
            order.append(number)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(work(number))
    assert order == list(range(20))


async def test_no_more_have_a_turn_than_there_are_lanes_whoever_goes_away() -> None:
    made, inside, most = lanes(2), 0, 0
    dice = random.Random(7)

    async def work() -> None:
        nonlocal inside, most
        async with made.acquire_start(StartWork.SHELL, is_urgent=dice.random() < 0.5):
            inside += 1
            most = max(most, inside)
            try:
                await asyncio.sleep(dice.random() / 1000)
            finally:
                inside -= 1

    tasks = [asyncio.create_task(work()) for _ in range(200)]
    for task in tasks:
        if dice.random() < 0.4:
            task.cancel()
        if dice.random() < 0.2:
            await asyncio.sleep(0)
    await asyncio.wait(tasks)
    assert most == 2
    # Both lanes are free again.
    async with (
        asyncio.timeout(60),
        made.acquire_start(StartWork.SHELL),
        made.acquire_start(StartWork.SHELL),
    ):
        pass


async def test_a_turn_that_came_as_its_waiter_went_is_the_next_ones() -> None:
    made = lanes()
    async with made.acquire_start(StartWork.SHELL):
        first = asyncio.create_task(_one_turn(made))
        second = asyncio.create_task(_one_turn(made))
        await asyncio.sleep(0)
    # The first was let in just now, and has not heard of it.
    first.cancel()
    async with asyncio.timeout(60):
        await second
    with pytest.raises(asyncio.CancelledError):
        await first


async def _one_turn(made: StartScheduler) -> None:
    async with made.acquire_start(StartWork.SHELL):
        pass


async def test_a_budget_that_is_spent_comes_back_with_time() -> None:
    made = StartScheduler(cores=1, room=100)
    async with asyncio.timeout(60):
        for _ in range(10):
            await _one_turn(made)


async def test_places_are_given_in_order_and_come_back_from_whoever_went() -> None:
    places, order = RunSlots(1, wait_limit_s=60), []

    async def run(number: int) -> None:
        await places.take()
        order.append(number)
        await asyncio.sleep(0)
        places.give()

    tasks = [asyncio.create_task(run(number)) for number in range(6)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    tasks[4].cancel()
    await asyncio.wait(tasks)
    assert order == [0, 1, 3, 5]
    assert places.taken == 0


async def test_a_place_that_came_as_its_waiter_went_is_the_next_ones() -> None:
    places = RunSlots(1, wait_limit_s=60)
    await places.take()
    first, second = (asyncio.create_task(places.take()) for _ in range(2))
    await asyncio.sleep(0)
    places.give()
    first.cancel()
    async with asyncio.timeout(60):
        await second
    assert places.taken == 1


async def test_who_waits_too_long_for_a_long_command_runs_beside_it() -> None:
    places = RunSlots(1, wait_limit_s=0.01)
    await places.take()
    await places.take()
    assert places.taken == 2
    places.give()
    waiting = asyncio.create_task(places.take())
    places.give()
    async with asyncio.timeout(60):
        await waiting
    assert places.taken == 1
