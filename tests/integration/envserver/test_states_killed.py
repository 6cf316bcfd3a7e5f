"""A node is killed before each line of what it does with a state, and another one goes on."""

import asyncio
import gc
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from etude.envserver.drivers.in_memory import MemoryDriver
from etude.envserver.host.host import Host
from etude.envserver.host.leases.preemption import PreemptedError
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.v1 import environments_pb2

FOLDER = "/etude/"
WATCHED = (
    *("common/atomic.py", "envserver/host/leases/records.py"),
    *("envserver/host/snapshots/environment_state.py", "envserver/drivers/folder_snapshots.py"),
    "envserver/host/snapshots/local_snapshots.py",
)
SAMPLED = (
    *("envserver/storage/copies.py", "envserver/storage/folders.py"),
    *("envserver/host/environment.py", "envserver/host/host.py"),
    "envserver/host/preemptions.py",
)
"""Every seventh line of these: a prime, so that loops are met in all of their places."""
STEP = 7
APART = 13
"""One line of so many is enough for a change; all of them are among the long tests."""
DONE, KILLED = 0, 9

Work = Callable[[Host, Path], Awaitable[None]]

FIX = {"path": "core.py", "old_string": "a - b", "new_string": "a + b"}
SPOIL = {"path": "core.py", "old_string": "a + b", "new_string": "a * b"}


def call(call_id: str, arguments: dict[str, str]) -> environments_pb2.ToolCall:
    return environments_pb2.ToolCall(
        call_id=call_id, name="search_replace", arguments_json=json.dumps(arguments)
    )


def node_on(scratch: Path) -> Host:
    driver = MemoryDriver(scratch / "leases")
    return Host(driver=driver, sources=WorkspaceSources(scratch), slots=4, templates={"python"})


def order(scratch: Path, name: str, snapshot_id: str = "") -> Any:
    lease = environments_pb2.Lease(
        lease_id=name,
        control_token="control",
        expires_unix_ms=round(1000 * (time.time() + 600)),
    )
    source = (scratch.parent / "source").as_uri()
    return environments_pb2.OpenEnvironmentsRequest(
        leases=[environments_pb2.HeldLease(lease=lease, run_id="run")],
        template="python",
        workspace=environments_pb2.WorkspaceSource(uri=source),
        toolset="Compact",
        snapshot_id=snapshot_id,
    )


async def nothing(node: Host, scratch: Path) -> None:
    """The lease runs."""


async def spoilt(scratch: Path, prepare: Work) -> None:
    """A lease with a snapshot of its repaired file, which it has spoilt since."""
    node = node_on(scratch)
    await node.take_over()
    await node.open(order(scratch, "a"))
    environment = node.find("a")
    await environment.run_turn([call("1", FIX)])
    await node.states.snapshot(environment, "s0", with_memory=False)
    await environment.run_turn([call("2", SPOIL)])
    await prepare(node, scratch)


async def core(node: Host, name: str) -> bytes:
    (written,) = (await node.find(name).diff()).written
    return written.content.strip().rpartition(b" return ")[2]


async def take(node: Host, scratch: Path) -> None:
    await node.states.snapshot(node.find("a"), "s1", with_memory=False)


async def put_back(node: Host, scratch: Path) -> None:
    await node.states.rollback(node.find("a"), "s0")


async def fork(node: Host, scratch: Path) -> None:
    (outcome,) = await node.open(order(scratch, "b", "s0"))
    assert outcome.HasField("lease"), outcome


async def drop(node: Host, scratch: Path) -> None:
    await node.states.drop(node.find("a"), "s0")


async def pause(node: Host, scratch: Path) -> None:
    await node.states.pause(node.find("a"))


async def resume(node: Host, scratch: Path) -> None:
    await node.resume("a", "control", ttl_s=60)


async def preempt(node: Host, scratch: Path) -> None:
    assert await node.preemptions.preempt(["a"], 1) == ["a"]


async def let_go_on(node: Host, scratch: Path) -> None:
    assert await node.preemptions.resume(["a"]) == ["a"]


async def pause_and_preempt(node: Host, scratch: Path) -> None:
    await pause(node, scratch)
    await preempt(node, scratch)


async def check_taken(node: Host, *, acknowledged: bool) -> None:
    assert await core(node, "a") == b"a * b"
    if acknowledged:
        assert "s1" in names(node)
    for name in names(node):
        await node.states.rollback(node.find("a"), name)
        assert await core(node, "a") == {"s0": b"a + b", "s1": b"a * b"}[name]


async def check_put_back(node: Host, *, acknowledged: bool) -> None:
    found = await core(node, "a")
    assert found == b"a + b" if acknowledged else found in {b"a + b", b"a * b"}
    # Either the call was never made and is made now, or it was and its result is known.
    (result,) = await node.find("a").run_turn([call("2", SPOIL)])
    assert result.content == b"ok"
    assert await core(node, "a") == b"a * b"
    (result,) = await node.find("a").run_turn([call("1", FIX)])
    assert result.content == b"ok"
    assert await core(node, "a") == b"a * b"


async def check_forked(node: Host, *, acknowledged: bool) -> None:
    held = {held.lease.lease_id for held in node.held_leases()}
    assert held == {"a", "b"} if acknowledged else held in ({"a"}, {"a", "b"})
    if "b" in held:
        assert await core(node, "b") == b"a + b"
    assert {folder.name for folder in node.driver.leases.iterdir()} == held
    assert await core(node, "a") == b"a * b"


async def check_dropped(node: Host, *, acknowledged: bool) -> None:
    if acknowledged:
        assert names(node) == []
    for name in names(node):
        await node.states.rollback(node.find("a"), name)
        assert await core(node, "a") == b"a + b"


async def check_paused(node: Host, *, acknowledged: bool) -> None:
    if acknowledged:
        assert node.find("a").is_paused
    await node.resume("a", "control", ttl_s=60)
    assert await core(node, "a") == b"a * b"


async def check_resumed(node: Host, *, acknowledged: bool) -> None:
    if acknowledged:
        assert not node.find("a").is_paused
    await check_paused(node, acknowledged=False)


async def check_preempted(node: Host, *, acknowledged: bool) -> None:
    environment = node.find("a")
    if acknowledged:
        assert environment.record.held.preempted
    if environment.record.held.preempted:
        with pytest.raises(PreemptedError):
            await environment.diff()
    assert await node.preemptions.resume(["a"]) == ["a"]
    assert await core(node, "a") == b"a * b"


async def check_goes_on(node: Host, *, acknowledged: bool) -> None:
    if acknowledged:
        assert not node.find("a").record.held.preempted
    await check_preempted(node, acknowledged=False)


async def check_still_paused(node: Host, *, acknowledged: bool) -> None:
    assert await node.preemptions.resume(["a"]) == ["a"]
    assert node.find("a").is_paused
    await check_paused(node, acknowledged=True)


def names(node: Host) -> list[str]:
    return sorted(each.snapshot_id for each in node.states.snapshots.held_snapshots())


def killed_before(line: int, work: Work, scratch: Path) -> int:
    """Do the work in a process that ends itself before a line; whether it did."""
    # What other tests left may wait in its destructor for threads that a child does not have.
    gc.disable()
    child = os.fork()
    if child == 0:
        seen = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal seen
            where = frame.f_code.co_filename.rpartition(FOLDER)[2]
            if event == "line" and where in {*WATCHED, *SAMPLED}:
                seen += STEP if where in WATCHED else 1
                if seen > STEP * line:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace if where in {*WATCHED, *SAMPLED} else None

        async def worked() -> None:
            node = node_on(scratch)
            await node.take_over()
            threading.settrace(trace)
            sys.settrace(trace)
            await work(node, scratch)
            sys.settrace(None)
            (scratch / "acknowledged").touch()

        try:
            asyncio.run(worked())
        except BaseException as error:  # noqa: BLE001 - the child must not return into pytest
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(DONE)
    gc.enable()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


async def succeed(scratch: Path, check: Callable[..., Awaitable[None]]) -> None:
    node = node_on(scratch)
    await node.take_over()
    folders = [each for each in node.states.snapshots.folder.iterdir() if each.is_dir()]
    assert len(folders) == len(names(node))
    assert "a" in {held.lease.lease_id for held in node.held_leases()}
    await check(node, acknowledged=(scratch / "acknowledged").exists())


@pytest.mark.parametrize(
    "apart", [APART, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"]
)
@pytest.mark.parametrize(
    ("work", "check", "prepare"),
    [
        (take, check_taken, nothing),
        (put_back, check_put_back, nothing),
        (fork, check_forked, nothing),
        (drop, check_dropped, nothing),
        (pause, check_paused, nothing),
        (resume, check_resumed, pause),
        (preempt, check_preempted, nothing),
        (let_go_on, check_goes_on, preempt),
        (preempt, check_still_paused, pause),
        (let_go_on, check_still_paused, pause_and_preempt),
    ],
    ids=[
        *("snapshot", "rollback", "fork", "drop", "pause", "resume"),
        *("preempt", "go on", "preempt paused", "go on paused"),
    ],
)
def test_whatever_line_a_host_dies_at_its_successor_finds_one_state_or_the_other(
    tmp_path: Path,
    work: Work,
    check: Callable[..., Awaitable[None]],
    prepare: Work,
    apart: int,
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "core.py").write_text("def add(a, b):\n    return a - b\n")
    before = tmp_path / "before"
    asyncio.run(spoilt(before, prepare))
    line, code = 0, -KILLED
    while code == -KILLED:
        # Leases say where their sources are, not where they are themselves.
        scratch = tmp_path / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(before, scratch, symlinks=True)
        code = killed_before(line, work, scratch)
        asyncio.run(succeed(scratch, check))
        line += apart
    assert code == DONE
    assert line > 10
