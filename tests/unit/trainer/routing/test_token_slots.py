"""Token slots: held while a completion is open, in the order of asking."""

import asyncio

import pytest

from etude.trainer.routing import token_slots
from etude.trainer.routing.token_slots import TokenSlots


async def hold_until(slots: TokenSlots, ends: asyncio.Event, held: list[int], number: int) -> None:
    async with slots.hold(lambda _: None):
        held.append(number)
        await ends.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_completions_wait_for_a_slot_in_the_order_of_asking() -> None:
    slots, ends, held = TokenSlots(limit=2), [asyncio.Event() for _ in range(4)], list[int]()
    async with asyncio.TaskGroup() as tasks:
        for number, end in enumerate(ends):
            tasks.create_task(hold_until(slots, end, held, number))
        await settle()
        assert held == [0, 1]
        ends[1].set()
        await settle()
        assert held == [0, 1, 2]
        slots.resize(3)
        await settle()
        assert held == [0, 1, 2, 3]
        for end in ends:
            end.set()
    assert slots.taken == 0


async def test_a_smaller_limit_drains_as_completions_end() -> None:
    slots, ends, held = TokenSlots(), [asyncio.Event() for _ in range(4)], list[int]()
    async with asyncio.TaskGroup() as tasks:
        for number, end in enumerate(ends[:3]):
            tasks.create_task(hold_until(slots, end, held, number))
        await settle()
        assert held == [0, 1, 2]
        slots.resize(1)
        tasks.create_task(hold_until(slots, ends[3], held, 3))
        ends[0].set()
        ends[1].set()
        await settle()
        assert held == [0, 1, 2]
        ends[2].set()
        await settle()
        assert held == [0, 1, 2, 3]
        ends[3].set()


async def test_a_cancelled_wait_takes_no_slot() -> None:
    slots, end, held = TokenSlots(limit=1), asyncio.Event(), list[int]()
    first = asyncio.create_task(hold_until(slots, end, held, 0))
    await settle()
    waiting = asyncio.create_task(hold_until(slots, end, held, 1))
    await settle()
    end.set()
    await settle_one(first, waiting)
    assert slots.taken == 0
    waits: list[float] = []
    async with asyncio.timeout(1), slots.hold(waits.append):
        assert slots.taken == 1
        assert waits == []


async def test_a_wait_is_noted_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_slots, "NOTE_S", 0.01)
    slots, end, waits = TokenSlots(limit=1), asyncio.Event(), list[float]()
    first = asyncio.create_task(hold_until(slots, end, [], 0))
    await settle()

    async def hold() -> None:
        async with slots.hold(waits.append):
            pass

    waiting = asyncio.create_task(hold())
    async with asyncio.timeout(10):
        while len(waits) < 3:  # noqa: ASYNC110 - the wait goes on
            await asyncio.sleep(0.01)
    assert not waiting.done()
    end.set()
    await asyncio.gather(first, waiting)
    assert slots.taken == 0


async def settle_one(first: "asyncio.Task[None]", cancelled: "asyncio.Task[None]") -> None:
    """Cancel a wait at the moment at which the slot is given to it."""
    await asyncio.wait([first])
    cancelled.cancel()
    await asyncio.wait([cancelled])
