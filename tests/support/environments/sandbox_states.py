"""What every driver does with the state of its sandboxes, for the tests of each."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from etude.agent.workspace import ExecResult
from etude.common.errors import CorruptError
from etude.envserver.drivers.base import Driver, Sandbox, SavedSandbox
from etude.envserver.storage import folders, trees
from etude.envserver.storage.folders import FolderLimits, TooLargeError
from etude.envserver.storage.trees import File

TREE = {
    "README": File(b"read me\n"),
    "run.sh": File(b"#!/bin/sh\necho ran\n", executable=True),
    "deep/er/notes.txt": File(b"one\ntwo\n"),
}
COMMAND_LIMIT_S = 120.0
CLOCK_SLACK_S = 2.0
LIMITS = FolderLimits(max_files=10_000, max_bytes=1 << 30)


async def nothing(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError((command, timeout_s))


class States:
    """A driver's sandboxes by name, and a folder for what is saved of them."""

    def __init__(self, driver: Driver, template: str, folder: Path) -> None:
        self.driver, self.template, self.folder = driver, template, folder
        self._made: list[Sandbox] = []

    def new(self, name: str) -> Sandbox:
        lease = self.driver.leases / name
        lease.mkdir()
        made = self.driver.sandbox(lease, nothing, template=self.template)
        self._made.append(made)
        return made

    async def begun(self, name: str) -> Sandbox:
        made = self.new(name)
        await made.initialize(TREE)
        return made

    async def saved(self, sandbox: Sandbox, name: str) -> tuple[Path, SavedSandbox]:
        folder = self.folder / name
        folder.mkdir()
        return folder, await sandbox.save(folder, LIMITS)

    async def close(self) -> None:
        for sandbox in self._made:
            await sandbox.close()


async def identity(sandbox: Sandbox) -> str:
    return trees.tree_identity((await sandbox.read_files(folders.SMALL)).tree)


async def a_saved_sandbox_goes_on_and_another_becomes_what_was_saved(states: States) -> None:
    one = await states.begun("one")
    await one.workspace.write("new/file", b"saved")
    before = await identity(one)
    folder, saved = await states.saved(one, "s")
    assert saved.num_bytes > 0
    assert await identity(one) == before
    await one.workspace.write("new/file", b"later")

    other = states.new("other")
    assert not other.is_started
    await other.restore(folder, saved)

    assert other.is_started
    assert await identity(other) == before
    await other.workspace.write("new/file", b"other")
    assert await one.workspace.read("new/file") == b"later"


async def a_restored_sandbox_forgets_what_came_after(states: States) -> None:
    sandbox = await states.begun("one")
    sandbox.workspace.notes.store("todo", b"first")
    folder, saved = await states.saved(sandbox, "s")
    for number in range(2):
        await sandbox.workspace.write("README", b"changed")
        await sandbox.workspace.delete("run.sh")
        await sandbox.workspace.write(f"new-{number}", b"")
        sandbox.workspace.notes.store("todo", b"second")
        sandbox.workspace.notes.store("more", b"")

        await sandbox.restore(folder, saved)

        assert await identity(sandbox) == trees.tree_identity(TREE)
        assert sandbox.workspace.notes.get("todo") == b"first"
        assert sandbox.workspace.notes.get("more") is None


async def a_fork_of_a_fork_holds_what_both_did(states: States) -> None:
    one = await states.begun("one")
    await one.workspace.write("by-one", b"1")
    other = states.new("other")
    await other.restore(*await states.saved(one, "s"))
    await other.workspace.write("by-other", b"2")
    third = states.new("third")
    await third.restore(*await states.saved(other, "t"))

    assert await third.workspace.read("by-one") == b"1"
    assert await third.workspace.read("by-other") == b"2"


async def a_damaged_snapshot_is_refused_and_changes_nothing(states: States) -> None:
    sandbox = await states.begun("one")
    folder, saved = await states.saved(sandbox, "s")
    await sandbox.workspace.write("README", b"changed")
    before = await identity(sandbox)
    large = max((path for path in folder.rglob("*") if path.is_file()), key=_size)
    data = bytearray(large.read_bytes())
    data[len(data) // 2] ^= 1
    large.write_bytes(data)

    for each in (sandbox, states.new("other")):
        with pytest.raises(CorruptError):
            await each.restore(folder, saved)

    assert await identity(sandbox) == before


async def another_snapshot_than_the_one_that_is_meant_is_refused(states: States) -> None:
    sandbox = await states.begun("one")
    _, first = await states.saved(sandbox, "s")
    await sandbox.workspace.write("README", b"changed")
    folder, _ = await states.saved(sandbox, "t")

    with pytest.raises(CorruptError):
        await sandbox.restore(folder, first)
    assert await sandbox.workspace.read("README") == b"changed"


async def what_is_too_large_is_not_saved_and_goes_on(states: States) -> None:
    sandbox = await states.begun("one")
    folder = states.folder / "s"
    folder.mkdir()

    with pytest.raises(TooLargeError):
        await sandbox.save(folder, FolderLimits(max_files=100, max_bytes=10))
    assert await identity(sandbox) == trees.tree_identity(TREE)


async def a_paused_sandbox_goes_on_as_it_was(states: States) -> None:
    sandbox = await states.begun("one")
    await sandbox.workspace.write("README", b"changed")
    before = await identity(sandbox)
    for _ in range(2):
        for _ in range(2):
            await sandbox.pause()
            assert sandbox.is_started
        for _ in range(2):
            await sandbox.resume()
        assert await identity(sandbox) == before


async def a_sandbox_that_was_never_begun_can_be_paused(states: States) -> None:
    sandbox = states.new("one")
    await sandbox.pause()
    await sandbox.resume()
    await sandbox.initialize(TREE)
    assert await identity(sandbox) == trees.tree_identity(TREE)


async def memory_and_running_commands_are_saved_too(states: States) -> None:
    parent = await states.begun("parent")
    count = "i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.2; done"
    job = await parent.workspace.jobs.start(count, timeout_s=None)
    await parent.run("echo before > /tmp/memory", COMMAND_LIMIT_S)
    folder, saved = await states.saved(parent, "s")
    await parent.run("echo after > /tmp/memory", COMMAND_LIMIT_S)
    assert (await parent.workspace.jobs.state(job)).is_running

    child = states.new("child")
    await child.restore(folder, saved)
    await parent.restore(folder, saved)

    for each in (child, parent):
        assert (await each.run("cat /tmp/memory", COMMAND_LIMIT_S)).output == b"before\n"
        assert each.workspace.jobs.may_run
        assert (await each.workspace.jobs.state(job)).is_running
        # It is written anew each time, and so may be found empty.
        look = 'n=$(cat count); until [ "$(cat count)" != "$n" ]; do sleep 0.2; done'
        assert (await each.run(look, COMMAND_LIMIT_S)).exit_code == 0
        await each.workspace.jobs.kill(job)


async def siblings_start_equal_and_draw_random_numbers_of_their_own(
    states: States, count: int = 3
) -> None:
    parent = await states.begun("parent")
    setup = "head -c 1048576 /dev/urandom > /tmp/memory; head -c 4096 /dev/urandom > built"
    assert (await parent.run(setup, COMMAND_LIMIT_S)).exit_code == 0
    folder, saved = await states.saved(parent, "s")
    siblings = [states.new(f"sibling-{number}") for number in range(count)]
    for each in siblings:
        await each.restore(folder, saved)

    seen = [await _look(each) for each in (parent, *siblings)]

    assert len({start.files for start in seen}) == 1
    assert len({start.memory for start in seen}) == 1
    assert len({start.random for start in seen}) == count + 1


class _Start(NamedTuple):
    """State of a sandbox at its start."""

    files: str
    memory: bytes
    random: bytes


async def _look(sandbox: Sandbox) -> _Start:
    """Digests of the files and of a file in memory, and fresh random numbers; checks the clock."""
    files = await identity(sandbox)
    before_s = time.time()
    look = "date +%s; md5sum < /tmp/memory; head -c 16 /dev/urandom | md5sum"
    words = (await sandbox.run(look, COMMAND_LIMIT_S)).output.split()
    assert before_s - CLOCK_SLACK_S <= int(words[0]) <= time.time() + CLOCK_SLACK_S
    return _Start(files, words[1], words[3])


def _size(path: Path) -> int:
    return path.stat().st_size


CHECKS: tuple[Callable[[States], Awaitable[None]], ...] = (
    a_saved_sandbox_goes_on_and_another_becomes_what_was_saved,
    a_restored_sandbox_forgets_what_came_after,
    a_fork_of_a_fork_holds_what_both_did,
    a_damaged_snapshot_is_refused_and_changes_nothing,
    another_snapshot_than_the_one_that_is_meant_is_refused,
    what_is_too_large_is_not_saved_and_goes_on,
    a_paused_sandbox_goes_on_as_it_was,
    a_sandbox_that_was_never_begun_can_be_paused,
)
MEMORY_CHECKS: tuple[Callable[[States], Awaitable[None]], ...] = (
    *CHECKS,
    memory_and_running_commands_are_saved_too,
    siblings_start_equal_and_draw_random_numbers_of_their_own,
)
"""Of drivers that save memory."""
