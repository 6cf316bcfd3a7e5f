"""What a node wrote down about its machines, and what a successor makes of it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.envserver.drivers import process_identity
from etude.envserver.drivers.process_identity import MARK, ProcessId
from etude.envserver.drivers.vm import vm_record, vmm_processes
from etude.envserver.drivers.vm.vm_record import VmRecord
from etude.envserver.drivers.vm.vmm_processes import VM_FOLDER, VmFolders

GONE = ProcessId(pid=1 << 22, started=1, boot="another life of the host")
SLEEP = "import time; print(flush=True); time.sleep(600)"

processes = st.builds(ProcessId, pid=st.integers(1), started=st.integers(0), boot=st.text())
vm_records = st.builds(
    VmRecord,
    process=processes,
    uid=st.integers(0),
    template=st.text(),
    env_id=st.text(),
    generation=st.integers(0),
    is_begun=st.booleans(),
)


@pytest.fixture
def places(tmp_path: Path) -> VmFolders:
    made = VmFolders(scratch=tmp_path)
    made.leases.mkdir()
    return made


@pytest.fixture
def monitor(places: VmFolders) -> Iterator[ProcessId]:
    """A process that looks like a monitor of this node."""
    mark = {MARK: str(places.warm_pool / "1")}
    with subprocess.Popen([sys.executable, "-c", SLEEP], env=mark, stdout=PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # until then /proc may still show no environment
        found = process_identity.identify(process.pid)
        assert found is not None
        yield found
        process.kill()


def lease(places: VmFolders, name: str) -> Path:
    folder = places.leases / name / VM_FOLDER
    folder.mkdir(parents=True)
    return folder


def note(folder: Path, *, is_begun: bool, process: ProcessId = GONE) -> VmRecord:
    noted = VmRecord(process=process, uid=0, template="t", is_begun=is_begun)
    vm_record.save(folder, noted, is_durable=False)
    return noted


@given(vm_records)
def test_a_record_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, noted: VmRecord
) -> None:
    folder = tmp_path_factory.mktemp("machine")
    assert vm_record.load(folder) is None
    vm_record.save(folder, noted, is_durable=noted.is_begun)
    assert vm_record.load(folder) == noted
    assert [path.name for path in folder.iterdir()] == [vm_record.FILE]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"process": 1}', '{"uid": "0"}'])
def test_a_damaged_record_is_said_to_be_one(tmp_path: Path, text: str) -> None:
    (tmp_path / vm_record.FILE).write_text(text)
    with pytest.raises(CorruptError, match=vm_record.FILE):
        vm_record.load(tmp_path)


def test_what_begun_is_left_and_what_has_not_is_removed(places: VmFolders) -> None:
    begun = lease(places, "begun")
    noted = note(begun, is_begun=True)
    note(lease(places, "cut-off"), is_begun=False)
    lease(places, "empty")
    (places.warm_pool / "1").mkdir(parents=True)
    note(places.warm_pool / "1", is_begun=False)
    (places.scratch / "boot-0").mkdir()

    assert vmm_processes.reap_at_start(places) == {begun: noted}
    assert places.folders() == [begun]
    assert (places.leases / "cut-off").is_dir()


def test_a_lease_with_a_damaged_record_does_not_begin_anew(places: VmFolders) -> None:
    damaged = lease(places, "damaged")
    (damaged / vm_record.FILE).write_text("{")
    assert vmm_processes.reap_at_start(places) == {}
    assert damaged.is_dir()


def test_a_vm_that_sleeps_is_what_its_file_says(places: VmFolders, monitor: ProcessId) -> None:
    folder = lease(places, "a")
    note(folder, is_begun=True, process=monitor)
    (folder.parent / "asleep.3").write_bytes(b"its state")
    assert vmm_processes.reap_at_start(places) == {}
    assert not folder.exists()
    assert (folder.parent / "asleep.3").exists()
    assert process_identity.open_pidfd(monitor) is None


def test_a_monitor_is_found_by_its_mark_and_ended_if_nobody_knows_it(
    places: VmFolders, monitor: ProcessId
) -> None:
    assert list(vmm_processes.find_marked_processes(places.scratch)) == [monitor]
    note(lease(places, "a"), is_begun=True, process=monitor)
    vmm_processes.reap_at_start(places)
    assert list(vmm_processes.find_marked_processes(places.scratch)) == [monitor]
    (places.leases / "a" / VM_FOLDER / vm_record.FILE).unlink()
    vmm_processes.reap_at_start(places)
    assert vmm_processes.find_marked_processes(places.scratch) == {}


def test_a_folder_whose_name_begins_alike_is_another_hosts(
    places: VmFolders, monitor: ProcessId, tmp_path: Path
) -> None:
    assert vmm_processes.find_marked_processes(tmp_path / "sto") == {}
    assert list(vmm_processes.find_marked_processes(tmp_path / "stock")) == [monitor]
    assert vmm_processes.find_marked_processes(tmp_path / "leases") == {}


def test_a_monitor_is_an_orphan_only_once_it_is_old_enough(
    places: VmFolders, monitor: ProcessId
) -> None:
    seen = vmm_processes.find_marked_processes(places.scratch)
    assert vmm_processes.find_orphans(seen, (), least_age_s=0) == [monitor]
    assert vmm_processes.find_orphans(seen, (), least_age_s=3600) == []
    assert vmm_processes.find_orphans(seen, [monitor], least_age_s=0) == []
    # It is still where it was started, and written down there.
    (places.warm_pool / "1").mkdir(parents=True)
    note(places.warm_pool / "1", is_begun=False, process=monitor)
    assert vmm_processes.find_orphans(seen, (), least_age_s=0) == []


def test_this_process_is_no_vm(places: VmFolders) -> None:
    mine = process_identity.identify(os.getpid())
    assert mine is not None
    assert mine not in vmm_processes.find_marked_processes(places.scratch)
    assert 0 <= vmm_processes.age_s(mine) < 1e6
