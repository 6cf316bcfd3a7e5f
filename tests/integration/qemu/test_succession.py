"""A driver of microVMs that is killed, and the one after it: machines, templates, orphans."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.vm import microvms
from tests.support.vm.daemons import Daemon

from etude.envserver.drivers import process_identity
from etude.envserver.drivers.vm import uid_pool, vmm_processes
from etude.envserver.drivers.vm.vmm_processes import VM_FOLDER
from etude.envserver.images.built_image import BuiltImage

LINES = (3, 90, 250, 500, 750, 950, 1_000, 5_000)
"""How many lines of the driver run before it dies; the last is more than there are."""
TSC_KHZ = microvms.small_machine().tsc_khz


Start = Callable[..., Daemon]
FORK_SERVER = "-fork-server-"
"""What is in the folder of a machine that others are split off from."""


@pytest.fixture(scope="session")
def booted(image: BuiltImage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a node left that had nothing but its template."""
    made = tmp_path_factory.mktemp("booted")
    daemon = Daemon(image, made, tsc_khz=TSC_KHZ, lines=0)
    assert daemon.report["boots"] == 1
    assert daemon.stop() == 0
    return made


@pytest.fixture
def scratch(booted: Path, tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(booted, tmp_path / "scratch")
    vmm_processes.kill_processes(vmm_processes.find_marked_processes(tmp_path))


@pytest.fixture
def start(image: BuiltImage, scratch: Path) -> Iterator[Start]:
    started: list[Daemon] = []

    def make(at: Path = scratch, *, tsc_khz: int = TSC_KHZ, lines: int = 0) -> Daemon:
        started.append(Daemon(image, at, tsc_khz=tsc_khz, lines=lines))
        return started[-1]

    yield make
    for each in started:
        each.kill()


def machines(scratch: Path) -> set[int]:
    """All but the one that others are split off from, of which each node has its own."""
    marked = vmm_processes.find_marked_processes(scratch).items()
    return {process.pid for process, folder in marked if FORK_SERVER not in folder.name}


def test_vms_and_their_template_outlive_a_killed_daemon(start: Start, scratch: Path) -> None:
    first = start()
    assert first.report["boots"] == 0
    names = ["a", "b", "c"]
    assert first.ask("begin", *names) == names
    first.ask("run", "a", "echo mine > mine; echo in memory > /tmp/mine")
    frozen = first.ask("freeze", "b")
    assert first.ask("call", "c", "sleep 1000; echo late > late") == "running"
    before = machines(scratch)
    first.kill()
    assert machines(scratch) == before

    second = start()
    assert second.report["boots"] == 0
    assert second.ask("find", *names) == dict.fromkeys(names, "begun")
    assert machines(scratch) == before
    assert frozen in before
    assert second.ask("run", "a", "cat mine /tmp/mine; uname -n") == "mine\nin memory\na\n"
    assert second.ask("run", "b", "cat README") == "read me\n"
    # What was cut off by the death has ended, and left nothing.
    assert second.ask("run", "c", "ls; pidof sleep") == "README\ndeep\n"
    second.ask("close", *names)
    assert machines(scratch) == set()


def users(scratch: Path) -> dict[str, int]:
    """Users of the leases' VMs, as the kernel has them."""
    noted = vmm_processes.load_records(vmm_processes.VmFolders(scratch=scratch))
    leased = {at.parent.name: each for at, each in noted.items() if at.name == VM_FOLDER}
    found = {name: Path(f"/proc/{each.process.pid}").stat().st_uid for name, each in leased.items()}
    assert found == {name: each.uid for name, each in leased.items()}
    return found


@pytest.mark.skipif(not uid_pool.are_mapped(), reason="users of VMs need root")
def test_a_vm_keeps_its_user_when_its_daemon_is_killed_and_no_later_vm_gets_it(
    start: Start, scratch: Path
) -> None:
    first = start()
    first.ask("begin", "a")
    before = users(scratch)
    assert set(before.values()) <= set(uid_pool.UIDS)
    first.kill()

    second = start()
    assert second.ask("find", "a") == {"a": "begun"}
    second.ask("begin", "b")
    after = users(scratch)
    assert after["a"] == before["a"]
    assert after["b"] != after["a"]


@pytest.mark.parametrize("name", ["memory", "state"])
def test_a_damaged_template_is_booted_again(start: Start, scratch: Path, name: str) -> None:
    (path,) = scratch.glob(f"templates/*/{name}")
    with path.open("r+b") as file:
        file.seek(random.randrange(path.stat().st_size))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert start().report["boots"] == 1


def test_another_hosts_template_is_booted_again(start: Start, scratch: Path) -> None:
    (scratch / "key").write_bytes(bytes(32))
    assert start().report["boots"] == 1


def test_another_machine_boots_its_own_template_and_forgets_the_old(
    start: Start, scratch: Path
) -> None:
    first = start()
    first.ask("begin", "a")
    first.kill()
    second = start(tsc_khz=TSC_KHZ + 1000)
    assert second.report["boots"] == 1
    assert "template is not booted" in second.ask("find", "a")["a"]
    assert machines(scratch) == set()
    assert len(list((scratch / "templates").iterdir())) == 1


def test_two_daemons_cannot_have_the_same_folder(start: Start, scratch: Path) -> None:
    first = start()
    assert start().report == {}
    assert first.ask("begin", "a") == ["a"]


def test_a_lease_whose_vm_died_with_the_daemon_is_lost_and_not_begun_anew(
    start: Start, scratch: Path
) -> None:
    first = start()
    first.ask("begin", "a", "b")
    first.kill()
    noted = vmm_processes.load_records(vmm_processes.VmFolders(scratch=scratch))
    vmm_processes.kill_processes([noted[scratch / "leases" / "a" / VM_FOLDER].process])
    second = start()
    found = second.ask("find", "a", "b")
    assert "has ended" in found["a"]
    assert found["b"] == "begun"


@pytest.mark.long
def test_a_vm_whose_host_dies_while_it_begins_is_whole_or_gone(start: Start, scratch: Path) -> None:
    outcomes = set()
    for number, lines in enumerate(LINES):
        first = start(lines=lines)
        if number % 2:
            first.ask("grow")  # then the machine is split off instead of started
        first.ask("!begin", "a")
        first.kill()
        (scratch / "leases" / "a").mkdir(exist_ok=True)

        second = start()
        found = second.ask("find", "a")["a"]
        outcomes.add(found)
        if found != "begun":
            assert found == "not begun"
            assert machines(scratch) == set()
            assert not (scratch / "leases" / "a" / VM_FOLDER).exists()
            assert second.ask("begin", "a") == ["a"]
        assert second.ask("run", "a", "cat README deep/er/notes.txt") == "read me\none\n"
        assert len(machines(scratch)) == 1
        second.ask("close", "a")
        second.kill()
    assert outcomes == {"begun", "not begun"}


def test_a_hundred_leases_leave_no_process_no_file_and_no_folder(
    start: Start, scratch: Path
) -> None:
    daemon = start()
    daemon.ask("grow")
    daemon.ask("begin", "first")
    num_open = daemon.ask("close", "first")
    for number in range(10):
        names = [f"l-{number}-{place}" for place in range(10)]
        assert daemon.ask("begin", *names) == names
        assert daemon.ask("close", *names) == num_open
    assert machines(scratch) == set()
    assert not list(scratch.glob(f"leases/*/{VM_FOLDER}"))
    assert all(FORK_SERVER in each.name for each in scratch.glob("stock/*"))
    assert daemon.stop() == 0
    assert not list(scratch.glob("stock/*"))


def test_the_sweep_ends_what_is_nobodys_and_nothing_of_another_host(
    start: Start, scratch: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(scratch, tmp_path / "other")
    neighbour, daemon = start(other), start()
    neighbour.ask("begin", "a")
    daemon.ask("begin", "a", "b", "c")
    assert daemon.ask("sweep") == 0
    # As after a death between the start of a monitor and its record, and as a node removes leases.
    (scratch / "leases" / "a" / VM_FOLDER / "vm.json").unlink()
    shutil.rmtree(scratch / "leases" / "b")
    assert daemon.ask("sweep") == 2
    assert len(machines(scratch)) == len(machines(other)) == 1
    assert daemon.ask("run", "c", "cat README") == "read me\n"
    assert neighbour.ask("run", "a", "cat README") == "read me\n"


def test_what_a_dead_host_never_wrote_down_is_ended_at_the_next_start(
    start: Start, scratch: Path
) -> None:
    first = start()
    first.ask("begin", "a", "b", "c")
    first.kill()
    (scratch / "leases" / "a" / VM_FOLDER / "vm.json").unlink()
    second = start()
    assert len(machines(scratch)) == 2
    assert second.ask("find", "a", "b") == {"a": "not begun", "b": "begun"}
    # The node did not go on with this lease.
    shutil.rmtree(scratch / "leases" / "c")
    assert second.ask("sweep") == 1
    assert len(machines(scratch)) == 1


def test_a_process_is_not_mistaken_for_the_one_that_had_its_number() -> None:
    mine = process_identity.identify(os.getpid())
    assert mine is not None
    earlier = process_identity.ProcessId(pid=mine.pid, started=mine.started - 1, boot=mine.boot)
    assert process_identity.open_pidfd(earlier) is None
    handle = process_identity.open_pidfd(mine)
    assert handle is not None
    os.close(handle)
