"""What the driver of Firecracker does with its sandboxes, over the fake: the common contract."""

import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.harness.golden.calls import ALL, Need
from tests.harness.golden.stages import leased
from tests.harness.golden.transcript import FILE, differences, paragraphs, play
from tests.harness.golden.tree import TREE
from tests.support.environments.sandbox_states import CHECKS, States
from tests.support.vm.firecracker.install import Make

from etude.envserver.drivers.base import SandboxError, Verification
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker import memory_files
from etude.envserver.drivers.vm.firecracker.driver import FirecrackerDriver
from etude.envserver.storage.trees import File

Check = Callable[[States], Awaitable[None]]
LIMIT_S = 120
HAS = ALL - {Need.GNU}
"""The small image has Busybox, whose words for what went wrong are others."""


@pytest.fixture
async def driver(make: Make, scratch: Path) -> AsyncIterator[FirecrackerDriver]:
    made = make(scratch)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def states(driver: FirecrackerDriver) -> AsyncIterator[States]:
    saved = driver.scratch / "saved"
    saved.mkdir(mode=0o700)
    made = States(driver, "python", saved)
    yield made
    await made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_driver_keeps_the_contract(states: States, check: Check) -> None:
    await check(states)


async def test_memory_and_commands_of_forks_of_forks_are_saved(states: States) -> None:
    parent = await states.begun("parent")
    job = await parent.workspace.jobs.start("while :; do sleep 1; done", timeout_s=None)
    look = "cat /tmp/memory; hostname; head -c 16 /dev/urandom | md5sum"
    seen = []
    for number, name in enumerate(("parent", "child", "grandchild")):
        # Each saves twice: what changed before the first is in the second too.
        await parent.run(f"echo {number} >> /tmp/memory", LIMIT_S)
        await states.saved(parent, f"s{number}-before")
        await parent.run(f"echo {number}+ >> /tmp/memory", LIMIT_S)
        folder, saved = await states.saved(parent, f"s{number}")
        assert (await parent.workspace.jobs.state(job)).is_running
        seen.append((await parent.run(look, LIMIT_S)).output.split())
        assert seen[-1][-3] == name.encode()
        if name != "grandchild":
            parent = states.new({"parent": "child", "child": "grandchild"}[name])
            await parent.restore(folder, saved)
    assert seen[-1][:-3] == [b"0", b"0+", b"1", b"1+", b"2", b"2+"]
    assert len({words[-2] for words in seen}) == 3


@pytest.mark.long
async def test_a_vm_that_slept_goes_on_with_what_it_was(states: States) -> None:
    one = await states.begun("one")
    await one.run("echo here > /tmp/memory", LIMIT_S)
    for _ in range(2):
        await one.pause()
        assert not (Path(states.driver.leases) / "one" / "machine").exists()
        assert (await one.run("cat /tmp/memory; hostname", LIMIT_S)).output == b"here\none\n"


async def test_a_vm_that_cannot_be_saved_goes_on(
    states: States, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await states.begun("one")
    await one.run("echo here > /tmp/memory", LIMIT_S)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(memory_files, "encode_delta", full)
        with pytest.raises(VmmError, match="full"):
            await one.pause()
        assert one.is_intact
        with pytest.raises(SandboxError, match="full"):
            await states.saved(one, "s")
        assert one.is_intact

    assert (await one.run("cat /tmp/memory", LIMIT_S)).output == b"here\n"
    folder, saved = await states.saved(one, "t")
    other = states.new("other")
    await other.restore(folder, saved)
    assert (await other.run("cat /tmp/memory", LIMIT_S)).output == b"here\n"


async def test_a_verifier_runs_in_a_vm_where_nobody_was(driver: FirecrackerDriver) -> None:
    work = Verification(
        template="python",
        workspace={"answer": File(b"42")},
        tests={"test.sh": File(b"cat /workspace/answer; printf 1 > /logs/reward.txt")},
        command="sh /tests/test.sh",
        timeout_s=60,
        reward_path="/logs/reward.txt",
    )
    done = await driver.verify(work)
    assert (done.output, done.exit_code, done.collected) == (b"42", 0, b"1")
    assert list(driver.leases.iterdir()) == []


@pytest.mark.long
async def test_a_vm_gives_the_golden_results(driver: FirecrackerDriver) -> None:
    async with leased(driver, HAS, template="python") as stage:
        rows = await play(stage, TREE)
    assert not list(differences(rows, paragraphs(FILE.read_text())))
    assert {need for row in rows for need in row.missing} == {Need.GNU}
