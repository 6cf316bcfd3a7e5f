"""What the driver of gVisor does with the state of its sandboxes: memory included."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.support.sandbox_states import CHECKS, States

from etude.envserver.drivers.gvisor.driver import GvisorDriver

Check = Callable[[States], Awaitable[None]]
LIMIT_S = 60


@pytest.fixture
async def states(driver: GvisorDriver, saved: Path) -> AsyncIterator[States]:
    made = States(driver, "small", saved)
    yield made
    await made.close()
    assert await driver._runsc.containers() == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_driver_keeps_the_contract(states: States, check: Check) -> None:
    await check(states)


async def test_memory_and_running_commands_are_saved_too(states: States) -> None:
    parent = await states.begun("parent")
    count = "i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.2; done"
    job = await parent.workspace.jobs.start(count, timeout_s=None)
    await parent.run("echo before > /tmp/memory", LIMIT_S)
    folder, saved = await states.saved(parent, "s")
    await parent.run("echo after > /tmp/memory", LIMIT_S)
    assert (await parent.workspace.jobs.state(job)).is_running

    child = states.new("child")
    await child.restore(folder, saved)
    await parent.restore(folder, saved)

    for each in (child, parent):
        assert (await each.run("cat /tmp/memory", LIMIT_S)).output == b"before\n"
        assert each.workspace.jobs.may_run
        assert (await each.workspace.jobs.state(job)).is_running
        counted = await each.run("n=$(cat count); sleep 1; [ $(cat count) -gt $n ]", LIMIT_S)
        assert counted.exit_code == 0
