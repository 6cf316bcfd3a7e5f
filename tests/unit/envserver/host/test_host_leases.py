"""How leases are opened, guarded, ended, and continued by a successor."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.common.errors import ForbiddenError, WrongStateError
from etude.envserver.drivers.in_memory import MemoryDriver
from etude.envserver.host import launch_source
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.host import Host
from etude.envserver.storage import folders
from etude.v1 import environments_pb2

MakeNode = Callable[..., Host]
Order = Callable[..., environments_pb2.OpenEnvironmentsRequest]

FIX = {"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"}


def call(call_id: str, name: str, **arguments: str) -> environments_pb2.ToolCall:
    return environments_pb2.ToolCall(
        call_id=call_id, name=name, arguments_json=json.dumps(arguments)
    )


async def opened(node: Host, order: Order, name: str = "a") -> LeasedEnvironment:
    await node.open(order(name))
    return node.find(name)


async def said(environment: LeasedEnvironment, *calls: environments_pb2.ToolCall) -> list[str]:
    return [result.content.decode() for result in await environment.run_turn(calls)]


def commands(node: Host) -> list[str]:
    assert isinstance(node.driver, MemoryDriver)
    return node.driver.commands


async def test_tokens_open_what_they_are_for(make_node: MakeNode, order: Order) -> None:
    environment = await opened(make_node(), order)

    environment.check_agent("agent-a")
    environment.check_agent("control-a")
    environment.check_control("control-a")
    for check, token in (
        (environment.check_agent, "agent-b"),
        (environment.check_agent, ""),
        (environment.check_control, "agent-a"),
        (environment.check_control, ""),
    ):
        with pytest.raises(ForbiddenError):
            check(token)


async def test_a_host_holds_no_more_than_its_slots(make_node: MakeNode, order: Order) -> None:
    node = make_node(slots=2)

    outcomes = await node.open(order("a", "b", "c"))

    assert [o.failure.reason for o in outcomes] == ["", "", "NoSlot"]
    again = await node.open(order("b"))
    assert again[0].lease.lease_id == "b"


async def test_a_lease_says_where_it_is_and_how_strong_its_wall(
    make_node: MakeNode, order: Order
) -> None:
    (outcome,) = await make_node().open(order("a"))

    lease = outcome.lease
    assert (lease.endpoint, lease.driver) == ("here:1", "memory")
    assert lease.isolation == environments_pb2.ISOLATION_WEAK


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"template": "foreign"}, "WeakIsolation"),
        ({"template": "other"}, "NotFound"),
        ({"toolset": "Other"}, "InvalidArgument"),
    ],
)
async def test_what_cannot_be_opened_says_why(
    make_node: MakeNode, order: Order, change: dict[str, str], reason: str
) -> None:
    asked = order("a")
    asked.MergeFrom(environments_pb2.OpenEnvironmentsRequest(**change))  # type: ignore[arg-type]

    (outcome,) = await make_node().open(asked)

    assert outcome.failure.reason == reason


async def test_a_source_that_is_missing_or_holds_links_is_refused(
    make_node: MakeNode, order: Order, tmp_path: Path
) -> None:
    folder = tmp_path / "linked"
    folder.mkdir()
    (folder / "passwd").symlink_to("/etc/passwd")

    for uri in (folder.as_uri(), (tmp_path / "nowhere").as_uri()):
        (outcome,) = await make_node().open(order("a", uri=uri))
        assert outcome.failure.reason in {"InvalidTask", "InvalidSpec"}
        assert uri.removeprefix("file://") in outcome.failure.message


async def test_a_lease_name_that_is_a_path_is_refused(make_node: MakeNode, order: Order) -> None:
    outcomes = await make_node().open(order("../x", "a/b", "", "A"))

    assert all(o.failure.reason == "InvalidArgument" for o in outcomes)


async def test_leases_end_with_their_time(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    await node.open(order("a", "b", ttl_s=60))
    expiry = environments_pb2.LeaseExpiry(
        lease_id="b", expires_unix_ms=round(1000 * (time.time() + 600))
    )
    node.renew([expiry])

    assert await node.expire(now_s=time.monotonic() + 59) == []
    assert await node.expire(now_s=time.monotonic() + 61) == ["a"]
    assert [held.lease.lease_id for held in node.held_leases()] == ["b"]


async def test_a_full_disk_is_told_before_anything_is_written(
    make_node: MakeNode, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_source, "RESERVE_BYTES", 1 << 60)

    (outcome,) = await make_node().open(order("a"))

    assert outcome.failure.reason == "SandboxFailed"
    assert "MiB left" in outcome.failure.message


async def test_a_successor_continues_the_leases_and_their_results(
    make_node: MakeNode, order: Order
) -> None:
    dead = make_node()
    await dead.open(order("a", "b"))
    fix = call("1", "search_replace", **FIX)
    await said(dead.find("a"), fix)

    node = make_node()
    assert await node.take_over() == (2, 0)

    environment = node.find("a")
    environment.check_agent("agent-a")
    assert await said(environment, fix) == ["ok"]
    test = call("2", "run_terminal", command="pytest -q")
    assert await said(environment, test) == ["1 passed"]
    assert len((await environment.diff()).written) == 1
    assert await node.find("b").diff() == environments_pb2.WorkspaceDiff()


async def test_a_client_that_has_missed_a_call_is_refused(
    make_node: MakeNode, order: Order
) -> None:
    environment = await opened(make_node(), order)
    await environment.run_turn([call("1", "search_replace", **FIX)])
    test = call("2", "run_terminal", command="pytest -q")
    assert len(await environment.run_turn([test], known=["1", "2"])) == 1
    with pytest.raises(WrongStateError, match="call '2' ran too"):
        await environment.run_turn([call("3", "search_replace", **FIX)], known=["1", "3"])
    with pytest.raises(WrongStateError):
        await environment.run_turn([], known=["1"])
    assert not await environment.run_turn([], known=["1", "2"])


async def test_a_turn_that_was_cut_off_without_a_trace_is_run_again(
    make_node: MakeNode, order: Order
) -> None:
    dead = make_node()
    environment = await opened(dead, order)
    await said(environment, call("0", "search_replace", **FIX))
    assert isinstance(dead.driver, MemoryDriver)
    dead.driver.gate = asyncio.Event()
    test = call("1", "run_terminal", command="pytest -q")
    cut_off = asyncio.create_task(said(environment, test))
    await dead.driver.command_started.wait()

    node = make_node()
    assert await node.take_over() == (1, 0)
    assert await said(node.find("a"), test) == ["1 passed"]
    cut_off.cancel()


async def test_a_turn_that_was_cut_off_in_the_middle_of_a_change_loses_its_lease(
    make_node: MakeNode, order: Order
) -> None:
    dead = make_node()
    environment = await opened(dead, order)
    assert isinstance(dead.driver, MemoryDriver)
    dead.driver.gate = asyncio.Event()
    calls = call("1", "search_replace", **FIX), call("2", "run_terminal", command="pytest -q")
    cut_off = asyncio.create_task(said(environment, *calls))
    await dead.driver.command_started.wait()

    node = make_node()
    assert await node.take_over() == (0, 1)
    assert list(node.driver.leases.iterdir()) == []
    cut_off.cancel()


async def test_folders_that_are_no_leases_are_swept(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    (node.driver.leases / "grade-0" / "workspace").mkdir(parents=True)
    (node.driver.leases / "half").mkdir()
    (node.driver.leases / "half" / "state.json.partial").write_text("{")

    assert await node.take_over() == (0, 2)
    assert list(node.driver.leases.iterdir()) == []


async def test_a_lease_whose_source_has_changed_is_not_continued(
    make_node: MakeNode, order: Order, tmp_path: Path
) -> None:
    await make_node().open(order("a"))
    (tmp_path / "task/environment/shop/core.py").write_text("pass\n")

    assert await make_node().take_over() == (0, 1)


async def test_a_folder_that_cannot_be_removed_ends_neither_its_host_nor_the_next(
    make_node: MakeNode, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path) -> None:
        raise OSError(f"{folder} stays")

    node = make_node()
    await opened(node, order)
    (node.driver.leases / "torn").mkdir()
    monkeypatch.setattr(folders, "remove_folder", fails)

    await node.close(["a"])
    assert await make_node().take_over() == (1, 0)
