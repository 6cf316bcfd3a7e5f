"""A task's set-up on a host that dies, and snapshots that end when their time is over."""

import asyncio
import time
from collections.abc import Callable

import pytest
from tests.support.environments.host_calls import FIX, Order, call, opened, said

from etude.common.errors import WrongStateError
from etude.envserver.drivers.base import CommandOutcome
from etude.envserver.drivers.folder_driver import FolderCommand
from etude.envserver.drivers.in_memory import MemoryDriver
from etude.envserver.host import task_setup
from etude.envserver.host.host import Host

MakeNode = Callable[..., Host]


def build(command: FolderCommand) -> CommandOutcome:
    """Writes the file that a command names."""
    (command.workspace / command.command).write_text("built\n")
    return CommandOutcome(output=b"", exit_code=0)


async def test_a_successor_knows_what_was_set_up_and_what_it_wrote(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node(answer=build)
    environment = await opened(node, order, "a")
    done = await task_setup.set_up(node.states, environment, ["x", "y"], timeout_s=5)
    assert done.succeeded == 2
    await node.states.snapshot(environment, "start", with_memory=False)

    successor = make_node(answer=build)
    await successor.take_over()

    adopted = successor.find("a")
    assert adopted.record.is_prepared
    changed = await adopted.diff()
    assert not changed.written
    assert not changed.deleted
    asked = order("b")
    asked.snapshot_id = "start"
    await successor.open(asked)
    assert successor.find("b").record.is_prepared
    assert successor.find("b").record.setup_files == adopted.record.setup_files
    (kept,) = successor.states.snapshots.of_lease("a", "control-a")
    assert kept.terms.is_prepared


async def test_a_set_up_that_its_host_did_not_survive_is_not_repeated_in_its_lease(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node(answer=build)
    assert isinstance(node.driver, MemoryDriver)
    node.driver.gate = asyncio.Event()
    environment = await opened(node, order, "a")
    dying = asyncio.create_task(task_setup.set_up(node.states, environment, ["x"], timeout_s=5))
    await node.driver.command_started.wait()

    successor = make_node(answer=build)
    await successor.take_over()

    with pytest.raises(WrongStateError, match="was used"):
        await task_setup.set_up(successor.states, successor.find("a"), ["x"], timeout_s=5)
    assert not successor.find("a").record.is_prepared
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    node.driver.gate.set()
    await node.close(["a"])


async def test_a_snapshot_ends_with_its_own_time_although_its_run_goes_on(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    environment = await opened(node, order)
    await node.states.snapshot(environment, "short", with_memory=False, ttl_s=60)
    await node.states.snapshot(environment, "long", with_memory=False)

    removed = await node.states.snapshots.remove_expired(
        {"run"}, now_s=time.monotonic(), now_unix_ms=round(1000 * (time.time() + 61))
    )

    assert removed == ["short"]
    assert [each.snapshot_id for each in node.states.snapshots.held_snapshots()] == ["long"]


async def test_a_snapshot_after_an_agents_call_is_no_place_for_hidden_tests(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node(answer=build)
    environment = await opened(node, order, "a")
    await task_setup.set_up(node.states, environment, ["x"], timeout_s=5)
    await said(environment, call("1", "search_replace", **FIX))

    made = await node.states.snapshot(environment, "later", with_memory=False)

    assert not made.terms.is_prepared
    assert made.terms.setup_files == environment.record.setup_files != {}
