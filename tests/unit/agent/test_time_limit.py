"""The time of a rollout stands still while the services that it needs are away."""

import asyncio

import pytest

from etude.agent.time_limit import time_limit


async def test_time_without_pauses_is_limited() -> None:
    with pytest.raises(TimeoutError):
        async with time_limit(0.05, paused_s=lambda: 0.0):
            await asyncio.Event().wait()


async def test_pauses_that_become_known_meanwhile_move_the_end() -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    pauses = [0.0]
    loop.call_later(0.02, pauses.__setitem__, 0, 0.2)
    with pytest.raises(TimeoutError):
        async with time_limit(0.05, paused_s=lambda: pauses[0]):
            await asyncio.Event().wait()
    assert loop.time() - began_s >= 0.25


async def test_a_block_that_ends_in_time_leaves_no_timer() -> None:
    async with time_limit(0.01, paused_s=lambda: 0.0):
        pass
    await asyncio.sleep(0.03)  # a timer that is left would cancel this task
