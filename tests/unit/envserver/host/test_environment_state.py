"""What a node does with the state of its environments: saved, forked, put back."""

import asyncio
from collections.abc import Callable

import pytest
from tests.support.environments.host_calls import FIX, SPOIL, Order, call, content, opened, said

from etude.common.errors import (
    InvalidFieldError,
    ReusedIdError,
    UnknownIdError,
)
from etude.envserver.drivers.in_memory import MemoryDriver
from etude.envserver.host.host import Host
from etude.v1 import environments_pb2

MakeNode = Callable[..., Host]


async def forked(
    node: Host, order: Order, name: str, snapshot_id: str, **fields: object
) -> environments_pb2.LaunchBatchResponse:
    asked = order(name)
    asked.MergeFrom(
        environments_pb2.OpenEnvironmentsRequest(snapshot_id=snapshot_id, **fields)  # type: ignore[arg-type]
    )
    (outcome,) = await node.open(asked)
    return outcome


async def test_a_rollback_puts_files_back(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    environment = await opened(node, order)
    await said(environment, call("1", "search_replace", **FIX))
    await node.states.snapshot(environment, "good", with_memory=False)
    before = await environment.diff()
    await said(environment, call("2", "search_replace", **SPOIL))
    await said(environment, call("3", "write_file", path="new/file", content="x"))

    await node.states.rollback(environment, "good")

    assert await environment.diff() == before
    assert await said(environment, call("4", "run_terminal", command="pytest -q")) == ["1 passed"]


async def test_after_a_rollback_earlier_calls_have_results_and_later_ones_run_again_once(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    environment = await opened(node, order)
    early, late = call("1", "search_replace", **FIX), call("2", "search_replace", **SPOIL)
    await said(environment, early)
    await node.states.snapshot(environment, "s", with_memory=False)
    await said(environment, late)

    await node.states.rollback(environment, "s")

    assert await said(environment, early) == ["ok"]
    assert b"a + b" in await content(environment)
    for _ in range(2):
        assert await said(environment, late) == ["ok"]
        assert b"a * b" in await content(environment)


async def test_a_lease_can_go_back_and_forth_between_its_snapshots(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    environment = await opened(node, order)
    wanted = {}
    for number in range(3):
        write = call(str(number), "write_file", path="number", content=str(number))
        await said(environment, write)
        await node.states.snapshot(environment, f"s{number}", with_memory=False)
        wanted[f"s{number}"] = await environment.diff()

    for name in ("s0", "s2", "s1", "s1", "s0"):
        await node.states.rollback(environment, name)
        assert await environment.diff() == wanted[name]


async def test_the_same_snapshot_twice_is_one(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    environment = await opened(node, order)
    first = await node.states.snapshot(environment, "s", with_memory=False)
    await said(environment, call("1", "search_replace", **FIX))

    assert await node.states.snapshot(environment, "s", with_memory=False) == first
    assert [each.snapshot_id for each in node.states.snapshots.held_snapshots()] == ["s"]


async def test_an_id_that_another_lease_has_used_is_refused(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    one, other = await opened(node, order, "a"), await opened(node, order, "b")
    await node.states.snapshot(one, "s", with_memory=False)

    with pytest.raises(ReusedIdError):
        await node.states.snapshot(other, "s", with_memory=False)


@pytest.mark.parametrize("snapshot_id", ["", "../x", "a/b", ".hidden", "x" * 129, "a b", "ä"])
async def test_an_id_that_is_none_is_refused(
    make_node: MakeNode, order: Order, snapshot_id: str
) -> None:
    node = make_node()
    environment = await opened(node, order)

    with pytest.raises(InvalidFieldError, match="snapshot_id"):
        await node.states.snapshot(environment, snapshot_id, with_memory=False)


async def test_a_snapshot_of_another_lease_or_none_is_not_found(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    one, other = await opened(node, order, "a"), await opened(node, order, "b")
    await node.states.snapshot(one, "s", with_memory=False)

    for environment, name in ((other, "s"), (one, "t")):
        with pytest.raises(UnknownIdError):
            await node.states.rollback(environment, name)
        with pytest.raises(UnknownIdError):
            await node.states.drop(environment, name)


async def test_a_fork_starts_where_its_parent_was_and_goes_its_own_way(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    parent = await opened(node, order, "a")
    fix = call("1", "search_replace", **FIX)
    await said(parent, fix)
    await node.states.snapshot(parent, "s", with_memory=False)
    await said(parent, call("2", "search_replace", **SPOIL))

    outcome = await forked(node, order, "b", "s")

    assert outcome.lease.start == environments_pb2.START_DELTA
    child = node.find("b")
    child.check_control("control-b")
    assert b"a + b" in await content(child)
    # Its results are its own: the parent's call runs here, and finds nothing to replace.
    assert "ok" not in (await said(child, fix))[0]
    await said(child, call("2", "write_file", path="child", content="x"))
    assert b"a * b" in await content(parent)


async def test_a_fork_outlives_its_snapshot_and_its_parent(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    parent = await opened(node, order, "a")
    await said(parent, call("1", "search_replace", **FIX))
    await node.states.snapshot(parent, "s", with_memory=False)
    await forked(node, order, "b", "s")
    await node.states.drop(parent, "s")
    await node.close(["a"])

    assert b"a + b" in await content(node.find("b"))
    assert list(node.states.snapshots.folder.iterdir()) == []


async def test_a_fork_can_be_forked(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    one = await opened(node, order, "a")
    await said(one, call("1", "search_replace", **FIX))
    await node.states.snapshot(one, "s", with_memory=False)
    await forked(node, order, "b", "s")
    await said(node.find("b"), call("1", "search_replace", **SPOIL))
    await node.states.snapshot(node.find("b"), "t", with_memory=False)
    await forked(node, order, "c", "t")

    assert b"a * b" in await content(node.find("c"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"snapshot_id": "none"}, "NotFound"),
        ({"template": "foreign"}, "WeakIsolation"),
        ({"template": "second"}, "InvalidArgument"),
        ({"workspace": environments_pb2.WorkspaceSource(uri="file:///x")}, "InvalidArgument"),
    ],
)
async def test_what_cannot_be_forked_says_why(
    make_node: MakeNode, order: Order, fields: dict[str, object], reason: str
) -> None:
    node = make_node()
    await node.states.snapshot(await opened(node, order), "s", with_memory=False)

    outcome = await forked(node, order, "b", **{"snapshot_id": "s", **fields})  # type: ignore[arg-type]

    assert outcome.failure.reason == reason


async def test_a_snapshot_of_another_run_is_not_found(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    await node.states.snapshot(await opened(node, order), "s", with_memory=False)
    asked = order("b")
    asked.snapshot_id = "s"
    asked.leases[0].run_id = "another"

    (outcome,) = await node.open(asked)

    assert outcome.failure.reason == "NotFound"


async def test_snapshots_wait_for_the_turn_that_runs(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    environment = await opened(node, order)
    assert isinstance(node.driver, MemoryDriver)
    node.driver.gate = asyncio.Event()
    test = call("2", "run_terminal", command="pytest -q")
    turn = asyncio.create_task(said(environment, call("1", "search_replace", **FIX), test))
    await node.driver.command_started.wait()
    snapshot = asyncio.create_task(node.states.snapshot(environment, "s", with_memory=False))
    await asyncio.sleep(0)
    assert not snapshot.done()
    node.driver.gate.set()
    await turn
    await snapshot
    await node.states.rollback(environment, "s")

    assert await said(environment, test) == ["1 passed"]


async def test_a_snapshot_goes_on_when_its_caller_leaves(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    environment = await opened(node, order)
    async with environment.turn:
        impatient = asyncio.create_task(node.states.snapshot(environment, "s", with_memory=False))
        await asyncio.sleep(0)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient

    await node.states.rollback(environment, "s")
