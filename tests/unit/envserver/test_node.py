"""What a node does with leases, calls, restarts and full disks."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.common.errors import (
    ForbiddenError,
    InvalidFieldError,
    ReusedIdError,
    UnknownIdError,
)
from etude.envserver.drivers.base import Command, Outcome, SandboxError
from etude.envserver.drivers.memory import MemoryDriver, run_tests
from etude.envserver.node import folders
from etude.envserver.node import node as node_module
from etude.envserver.node.environment import Environment
from etude.envserver.node.node import Node
from etude.envserver.node.sources import Sources
from etude.v1 import environments_pb2

FILES = {
    "shop/core.py": "def add(a, b):\n    return a - b\n",
    "tests/test_repo.py": "from shop.core import add\ndef test_add():\n    assert add(1, 2) == 3\n",
    "Dockerfile": "FROM python\n",
}
FIX = {"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"}

MakeNode = Callable[..., Node]


@pytest.fixture
def source(tmp_path: Path) -> str:
    folder = tmp_path / "task" / "environment"
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder.as_uri()


@pytest.fixture
def make_node(tmp_path: Path) -> MakeNode:
    def make(slots: int = 4, answer: Callable[[Command], Outcome] = run_tests) -> Node:
        driver = MemoryDriver(tmp_path / "scratch" / "leases", answer)
        driver.leases.mkdir(parents=True, exist_ok=True)
        return Node(
            driver=driver,
            sources=Sources(tmp_path / "scratch"),
            slots=slots,
            templates={"python"},
            refused={"foreign": "not trusted"},
            endpoint="here:1",
        )

    return make


def order(
    source: str, *names: str, ttl_s: float = 60, template: str = "python"
) -> environments_pb2.OpenEnvironmentsRequest:
    leases = [
        environments_pb2.HeldLease(
            lease=environments_pb2.Lease(
                lease_id=name,
                agent_token=f"agent-{name}",
                control_token=f"control-{name}",
                expires_unix_ms=round(1000 * (time.time() + ttl_s)),
            ),
            index=index,
        )
        for index, name in enumerate(names)
    ]
    return environments_pb2.OpenEnvironmentsRequest(
        leases=leases,
        template=template,
        workspace=environments_pb2.WorkspaceSource(uri=source),
        toolset="Compact",
    )


def call(call_id: str, name: str, **arguments: str) -> environments_pb2.ToolCall:
    return environments_pb2.ToolCall(
        call_id=call_id, name=name, arguments_json=json.dumps(arguments)
    )


async def opened(node: Node, source: str, name: str = "a") -> Environment:
    await node.open(order(source, name))
    return node.find(name)


async def said(environment: Environment, *calls: environments_pb2.ToolCall) -> list[str]:
    return [result.content.decode() for result in await environment.run_turn(calls)]


def commands(node: Node) -> list[str]:
    assert isinstance(node.driver, MemoryDriver)
    return node.driver.commands


async def test_a_rollout_reads_repairs_and_tests(make_node: MakeNode, source: str) -> None:
    environment = await opened(make_node(), source)

    assert await said(environment, call("1", "run_terminal", command="pytest -q")) == [
        "FAILED test_add\n1 failed"
    ]
    assert await said(environment, call("2", "list_dir", path=".")) == ["shop/core.py"]
    both = call("3", "search_replace", **FIX), call("4", "run_terminal", command="pytest -q")
    assert await said(environment, *both) == ["ok", "1 passed"]


async def test_a_diff_is_what_the_calls_changed(make_node: MakeNode, source: str) -> None:
    environment = await opened(make_node(), source)
    assert await environment.diff() == environments_pb2.WorkspaceDiff()

    await said(environment, call("1", "search_replace", **FIX))

    (written,) = (await environment.diff()).written
    assert (written.path, written.content) == (
        "shop/core.py",
        b"def add(a, b):\n    return a + b\n",
    )


async def test_leases_from_one_source_do_not_share_files(make_node: MakeNode, source: str) -> None:
    node = make_node()
    one, other = await opened(node, source, "a"), await opened(node, source, "b")
    await said(one, call("1", "search_replace", **FIX))

    assert "a - b" in (await said(other, call("1", "read_file", path="shop/core.py")))[0]


async def test_a_repeated_call_is_answered_and_not_run(make_node: MakeNode, source: str) -> None:
    numbers = itertools.count(1)
    node = make_node(answer=lambda _: Outcome(output=b"%d" % next(numbers), exit_code=0))
    environment = await opened(node, source)
    asked = call("1", "run_terminal", command="date")

    assert await said(environment, asked) == ["1"]
    assert await said(environment, asked) == ["1"]
    assert await said(environment, asked, call("2", "run_terminal", command="date")) == ["1", "2"]


async def test_an_id_that_was_another_call_is_refused(make_node: MakeNode, source: str) -> None:
    environment = await opened(make_node(), source)
    await said(environment, call("1", "list_dir", path="."))

    with pytest.raises(ReusedIdError):
        await said(environment, call("1", "list_dir", path="shop"))


@pytest.mark.parametrize("ids", [("", "1"), ("1", "1")])
async def test_every_call_needs_its_own_id(
    make_node: MakeNode, source: str, ids: tuple[str, str]
) -> None:
    environment = await opened(make_node(), source)

    with pytest.raises(InvalidFieldError):
        await said(environment, *(call(i, "list_dir", path=".") for i in ids))


async def test_a_bad_call_is_an_answer(make_node: MakeNode, source: str) -> None:
    environment = await opened(make_node(), source)
    garbage = environments_pb2.ToolCall(call_id="2", name="grep", arguments_json="{")

    results = await environment.run_turn([call("1", "no_such_tool"), garbage])

    assert [r.content for r in results] == [b"Error: bad call"] * 2
    assert all(r.error == environments_pb2.TOOL_ERROR_KIND_INVALID for r in results)


async def test_a_turn_runs_to_its_end_when_its_caller_leaves(
    make_node: MakeNode, source: str
) -> None:
    node = make_node()
    assert isinstance(node.driver, MemoryDriver)
    node.driver.gate = asyncio.Event()
    environment = await opened(node, source)
    asked = call("1", "run_terminal", command="pytest -q")
    impatient = asyncio.create_task(environment.run_turn([asked]))
    await node.driver.begun.wait()
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient

    retry = asyncio.create_task(said(environment, asked))
    await asyncio.sleep(0)
    node.driver.gate.set()

    assert await retry == ["FAILED test_add\n1 failed"]
    assert commands(node) == ["pytest -q"]


async def test_a_lease_that_ends_ends_its_turn(make_node: MakeNode, source: str) -> None:
    node = make_node()
    assert isinstance(node.driver, MemoryDriver)
    node.driver.gate = asyncio.Event()
    environment = await opened(node, source)
    turn = asyncio.create_task(said(environment, call("1", "run_terminal", command="x")))
    await node.driver.begun.wait()

    await node.close(["a"])

    with pytest.raises(UnknownIdError):
        await turn
    with pytest.raises(UnknownIdError):
        node.find("a")
    with pytest.raises(UnknownIdError):
        await said(environment, call("2", "list_dir", path="."))
    assert list(node.driver.leases.iterdir()) == []


async def test_the_same_files_and_command_are_run_once(make_node: MakeNode, source: str) -> None:
    node = make_node()
    one, other = await opened(node, source, "a"), await opened(node, source, "b")
    test = call("1", "run_terminal", command="pytest -q")

    assert await said(one, test) == await said(other, test)
    assert commands(node) == ["pytest -q"]

    await said(other, call("2", "search_replace", **FIX))
    assert await said(other, call("3", "run_terminal", command="pytest -q")) == ["1 passed"]
    assert len(commands(node)) == 2


async def test_tests_that_change_files_are_run_each_time(make_node: MakeNode, source: str) -> None:
    def answer(command: Command) -> Outcome:
        with (command.workspace / "log").open("a") as file:
            file.write("x")
        return run_tests(command)

    node = make_node(answer=answer)
    one, other = await opened(node, source, "a"), await opened(node, source, "b")
    test = call("1", "run_terminal", command="pytest -q")
    await said(one, test)
    await said(other, test)

    assert len(commands(node)) == 2
    assert [f.path for f in (await other.diff()).written] == ["log"]


def broken(command: Command) -> Outcome:
    raise SandboxError(f"{command.command}: no sandbox")


async def test_a_turn_that_the_platform_broke_without_a_trace_can_be_repeated(
    make_node: MakeNode, source: str
) -> None:
    node = make_node(answer=broken)
    environment = await opened(node, source)
    test = call("1", "run_terminal", command="pytest -q")
    with pytest.raises(SandboxError):
        await said(environment, test)

    assert isinstance(node.driver, MemoryDriver)
    node.driver.answer = run_tests
    assert await said(environment, test) == ["FAILED test_add\n1 failed"]


async def test_a_turn_that_the_platform_broke_half_way_ends_its_lease(
    make_node: MakeNode, source: str
) -> None:
    environment = await opened(make_node(answer=broken), source)
    calls = call("1", "search_replace", **FIX), call("2", "run_terminal", command="pytest -q")

    for _ in range(2):
        with pytest.raises(UnknownIdError):
            await said(environment, *calls)
    with pytest.raises(UnknownIdError):
        await environment.diff()


async def test_a_policy_that_fills_its_workspace_hands_in_nothing(
    make_node: MakeNode, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "DIFF", folders.Limits(max_files=3, max_bytes=1 << 20))
    environment = await opened(make_node(), source)
    await said(environment, call("1", "search_replace", **FIX))

    assert await environment.diff() == environments_pb2.WorkspaceDiff()


async def test_tokens_open_what_they_are_for(make_node: MakeNode, source: str) -> None:
    environment = await opened(make_node(), source)

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


async def test_a_node_holds_no_more_than_its_slots(make_node: MakeNode, source: str) -> None:
    node = make_node(slots=2)

    outcomes = await node.open(order(source, "a", "b", "c"))

    assert [o.failure.reason for o in outcomes] == ["", "", "NoSlot"]
    again = await node.open(order(source, "b"))
    assert again[0].lease.lease_id == "b"


async def test_a_lease_says_where_it_is_and_how_strong_its_wall(
    make_node: MakeNode, source: str
) -> None:
    (outcome,) = await make_node().open(order(source, "a"))

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
    make_node: MakeNode, source: str, change: dict[str, str], reason: str
) -> None:
    asked = order(source, "a")
    asked.MergeFrom(environments_pb2.OpenEnvironmentsRequest(**change))  # type: ignore[arg-type]

    (outcome,) = await make_node().open(asked)

    assert outcome.failure.reason == reason


async def test_a_source_that_is_missing_or_holds_links_is_refused(
    make_node: MakeNode, tmp_path: Path
) -> None:
    folder = tmp_path / "linked"
    folder.mkdir()
    (folder / "passwd").symlink_to("/etc/passwd")

    for uri in (folder.as_uri(), (tmp_path / "nowhere").as_uri()):
        (outcome,) = await make_node().open(order(uri, "a"))
        assert outcome.failure.reason in {"InvalidTask", "InvalidSpec"}
        assert uri.removeprefix("file://") in outcome.failure.message


async def test_a_lease_name_that_is_a_path_is_refused(make_node: MakeNode, source: str) -> None:
    outcomes = await make_node().open(order(source, "../x", "a/b", "", "A"))

    assert all(o.failure.reason == "InvalidArgument" for o in outcomes)


async def test_leases_end_with_their_time(make_node: MakeNode, source: str) -> None:
    node = make_node()
    await node.open(order(source, "a", "b", ttl_s=60))
    expiry = environments_pb2.LeaseExpiry(
        lease_id="b", expires_unix_ms=round(1000 * (time.time() + 600))
    )
    node.renew([expiry])

    assert await node.expire(now_s=time.monotonic() + 59) == []
    assert await node.expire(now_s=time.monotonic() + 61) == ["a"]
    assert [held.lease.lease_id for held in node.held()] == ["b"]


async def test_a_full_disk_is_told_before_anything_is_written(
    make_node: MakeNode, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "RESERVE_BYTES", 1 << 60)

    (outcome,) = await make_node().open(order(source, "a"))

    assert outcome.failure.reason == "SandboxFailed"
    assert "MiB left" in outcome.failure.message


async def test_a_successor_continues_the_leases_and_their_results(
    make_node: MakeNode, source: str
) -> None:
    dead = make_node()
    await dead.open(order(source, "a", "b"))
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


async def test_a_turn_that_was_cut_off_without_a_trace_is_run_again(
    make_node: MakeNode, source: str
) -> None:
    dead = make_node()
    environment = await opened(dead, source)
    await said(environment, call("0", "search_replace", **FIX))
    assert isinstance(dead.driver, MemoryDriver)
    dead.driver.gate = asyncio.Event()
    test = call("1", "run_terminal", command="pytest -q")
    cut_off = asyncio.create_task(said(environment, test))
    await dead.driver.begun.wait()

    node = make_node()
    assert await node.take_over() == (1, 0)
    assert await said(node.find("a"), test) == ["1 passed"]
    cut_off.cancel()


async def test_a_turn_that_was_cut_off_in_the_middle_of_a_change_loses_its_lease(
    make_node: MakeNode, source: str
) -> None:
    dead = make_node()
    environment = await opened(dead, source)
    assert isinstance(dead.driver, MemoryDriver)
    dead.driver.gate = asyncio.Event()
    calls = call("1", "search_replace", **FIX), call("2", "run_terminal", command="pytest -q")
    cut_off = asyncio.create_task(said(environment, *calls))
    await dead.driver.begun.wait()

    node = make_node()
    assert await node.take_over() == (0, 1)
    assert list(node.driver.leases.iterdir()) == []
    cut_off.cancel()


async def test_folders_that_are_no_leases_are_swept(make_node: MakeNode, source: str) -> None:
    node = make_node()
    (node.driver.leases / "grade-0" / "workspace").mkdir(parents=True)
    (node.driver.leases / "half").mkdir()
    (node.driver.leases / "half" / "state.json.partial").write_text("{")

    assert await node.take_over() == (0, 2)
    assert list(node.driver.leases.iterdir()) == []


async def test_a_lease_whose_source_has_changed_is_not_continued(
    make_node: MakeNode, source: str, tmp_path: Path
) -> None:
    await make_node().open(order(source, "a"))
    (tmp_path / "task/environment/shop/core.py").write_text("pass\n")

    assert await make_node().take_over() == (0, 1)
