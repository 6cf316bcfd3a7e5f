"""What the driver of gVisor does with the state of its sandboxes: memory included."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.support.environments.sandbox_states import (
    MEMORY_CHECKS,
    States,
    siblings_start_equal_and_draw_random_numbers_of_their_own,
)

from etude.envserver.drivers.gvisor.driver import GvisorDriver

Check = Callable[[States], Awaitable[None]]


@pytest.fixture
async def states(driver: GvisorDriver, saved: Path) -> AsyncIterator[States]:
    made = States(driver, "small", saved)
    yield made
    await made.close()
    assert await driver._runsc.containers() == []


@pytest.mark.parametrize("check", MEMORY_CHECKS, ids=lambda check: check.__name__)
async def test_the_driver_keeps_the_contract(states: States, check: Check) -> None:
    await check(states)


@pytest.mark.long
async def test_sixteen_siblings_start_equal(states: States) -> None:
    await siblings_start_equal_and_draw_random_numbers_of_their_own(states, 16)
