"""How many rollouts run at once, over all workers and in each."""

import asyncio

import pytest

from etude.trainer.rollouts.leases import RolloutSlots
from etude.trainer.rollouts.protocol import share_token_slots, split_evenly


@pytest.mark.parametrize(
    ("total", "workers", "expected"),
    [(10, 4, [3, 3, 2, 2]), (8, 2, [4, 4]), (2, 3, [1, 1]), (64, 1, [64])],
)
def test_a_limit_is_divided_without_rest(total: int, workers: int, expected: list[int]) -> None:
    assert split_evenly(total, workers) == expected


@pytest.mark.parametrize(("total", "workers", "expected"), [(7, 3, [3, 2, 2]), (1, 3, [1, 1, 1])])
def test_each_worker_has_a_token_slot_at_least(
    total: int, workers: int, expected: list[int]
) -> None:
    assert share_token_slots(total, workers) == expected


async def test_a_phase_with_another_limit_gets_its_own_slots() -> None:
    slots = RolloutSlots()
    slots.resize(3)
    assert await slots.acquire(5) == 3
    slots.resize(1)
    waiting = asyncio.create_task(slots.acquire(1))
    for _ in range(2):
        slots.release()
        await asyncio.sleep(0)
        assert not waiting.done()
    slots.release()
    assert await waiting == 1
