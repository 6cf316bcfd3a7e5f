"""A disk that fails in the middle of a rollback: nothing pretends that it came to its end."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from etude.agent.workspace import ExecResult
from etude.common.errors import WrongStateError
from etude.envserver.drivers import folder_snapshots
from etude.envserver.drivers.base import HalfRestoredError, SavedSandbox
from etude.envserver.drivers.vm import delta_file, disk, sealed_files
from etude.envserver.drivers.vm.dirty_pages import PageBuffer
from etude.envserver.drivers.vm.interface import VmDelta
from etude.envserver.drivers.vm.sandbox import VmSandbox
from etude.envserver.drivers.vm.start.start_scheduler import RunSlots
from etude.envserver.drivers.vm.suspend import snapshots
from etude.envserver.drivers.vm.suspend.idle_policy import IdleTimeouts
from etude.envserver.drivers.vm.suspend.lease_vm import SuspendStore, VmContext, suspended_file
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.host import Host
from etude.envserver.host.leases.records import ROLLBACK
from etude.envserver.storage.folders import FolderLimits
from etude.v1 import environments_pb2

MakeNode = Callable[..., Host]
Order = Callable[..., environments_pb2.OpenEnvironmentsRequest]
KEY, TEMPLATE = b"k" * delta_file.KEY_BYTES, "ab" * 32


class Half(NamedTuple):
    """An environment with a snapshot that says good, and now says bad."""

    node: Host
    environment: LeasedEnvironment


def broken(*_arguments: object) -> None:
    raise OSError(errno.EIO, "the disk failed")


async def write(environment: LeasedEnvironment, number: str, old: str, new: str) -> None:
    arguments = json.dumps({"path": "shop/core.py", "old_string": old, "new_string": new})
    name = "search_replace"
    call = environments_pb2.ToolCall(call_id=number, name=name, arguments_json=arguments)
    await environment.run_turn([call])


async def content(environment: LeasedEnvironment) -> bytes:
    (written,) = (await environment.diff()).written
    return written.content.splitlines()[-1].strip()


@pytest.fixture
async def half(make_node: MakeNode, order: Order) -> Half:
    node = make_node()
    await node.open(order("a"))
    environment = node.find("a")
    await write(environment, "1", "a - b", "good")
    await node.states.snapshot(environment, "s", with_memory=False)
    await write(environment, "2", "good", "bad")
    return Half(node, environment)


def files_moved_away(_parts: folder_snapshots.FolderOwners, lease: Path) -> None:
    (lease / "workspace").rename(lease / "workspace.former")
    broken()


async def test_between_two_states_nothing_runs_but_another_rollback(
    half: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as disk:
        disk.setattr(folder_snapshots, "replace", files_moved_away)
        with pytest.raises(HalfRestoredError, match="the disk failed"):
            await half.node.states.rollback(half.environment, "s")
    with pytest.raises(WrongStateError, match="roll it back again"):
        await write(half.environment, "3", "bad", "worse")

    await half.node.states.rollback(half.environment, "s")

    assert await content(half.environment) == b"return good"
    assert not (half.environment.folder / ROLLBACK).exists()


async def test_calls_that_could_not_be_put_back_are_put_back_by_the_next_process(
    half: Half, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as disk:
        disk.setattr(LeasedEnvironment, "replace_history", broken)
        with pytest.raises(HalfRestoredError):
            await half.node.states.rollback(half.environment, "s")

    next_node = make_node()
    assert await next_node.take_over() == (1, 0)

    found = next_node.find("a")
    assert await content(found) == b"return good"
    await write(found, "2", "good", "again")
    assert await content(found) == b"return again"


async def test_a_failure_before_anything_was_touched_changes_nothing(
    half: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as disk:
        disk.setattr(folder_snapshots, "prepare", broken)
        with pytest.raises(Exception, match="the disk failed") as failed:
            await half.node.states.rollback(half.environment, "s")
    assert not isinstance(failed.value, HalfRestoredError)
    assert not (half.environment.folder / ROLLBACK).exists()
    assert await content(half.environment) == b"return bad"


async def never(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError((command, timeout_s))


async def test_a_vm_whose_notes_were_not_replaced_is_the_saved_one_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, lease = tmp_path / "saved", tmp_path / "lease"
    saved.mkdir()
    lease.mkdir()
    found = disk.create(saved, 1 << 20)
    (saved / disk.DISK).rename(saved / disk.PARTIAL)
    delta = VmDelta(
        template=TEMPLATE,
        is_full=False,
        stream=sealed_files.create_sealed("t", [b"x" * 99]),
        changed_bytes=1,
        disk=found,
    )
    delta_file.save(delta, saved / snapshots.DELTA, key=KEY)
    delta.close()
    what = SavedSandbox(
        num_bytes=1,
        digest=delta_file.digest(saved / snapshots.DELTA)
        + folder_snapshots.save(lease, {}, saved, FolderLimits(1, 1)).digest,
    )
    starter = SimpleNamespace(template=SimpleNamespace(address=TEMPLATE))
    home = VmContext(
        lease=lease,
        start=never,  # type: ignore[arg-type] # no machine is made here
        starter=lambda: starter,  # type: ignore[arg-type,return-value] # nor started
        suspend_store=SuspendStore(key=KEY, buffer=PageBuffer(4096)),
        run_slots=RunSlots(1, 1.0),
        idle_timeouts=IdleTimeouts(),
    )
    sandbox = VmSandbox(lease, never, home)
    monkeypatch.setattr(folder_snapshots, "replace_notes", broken)

    with pytest.raises(HalfRestoredError, match="the disk failed"):
        await sandbox.restore(saved, what)

    assert suspended_file(lease) is not None
    assert sandbox.is_intact
    assert sandbox.workspace is not None
    await sandbox.close()
