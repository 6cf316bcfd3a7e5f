"""Which driver a pool gets: the one it names, or the best that can run its templates."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from etude.common.api.pool.spec import EnvPoolSpec, Slot
from etude.envserver.drivers import selection
from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.drivers.gvisor import runsc
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.envserver.drivers.selection import DriverFolders, select_driver
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker import compatibility
from etude.envserver.drivers.vm.qemu.command_line import QemuConfig
from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.images.built_image import GUEST_VERSION
from etude.envserver.isolation.sandbox_layout import CommandLimits


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DriverFolders:
    """A machine without a monitor."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return DriverFolders(scratch=tmp_path / "scratch", images=tmp_path / "images")


def spec(template: dict[str, Any] | None = None, **fields: Any) -> EnvPoolSpec:
    isolation = {"minimum": "Process", **fields.pop("isolation", {})}
    templates = [{"name": "python", **(template or {})}]
    return EnvPoolSpec.model_validate({"templates": templates, "isolation": isolation, **fields})


def image(
    place: DriverFolders,
    name: str = "python",
    *,
    files: tuple[str, ...] = ("vmlinuz",),
    guest: int = GUEST_VERSION,
) -> Path:
    folder = place.images / "images" / ("0" * 32)
    folder.mkdir(parents=True)
    manifest = {"name": name, "files": dict.fromkeys(files, "0" * 64), "guest": guest}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


async def refused(pool: EnvPoolSpec, place: DriverFolders) -> DriverUnavailableError:
    with pytest.raises(DriverUnavailableError) as caught:
        await select_driver(pool, place)
    return caught.value


@pytest.mark.parametrize("driver", ["Auto", "Process"])
async def test_templates_without_images_are_processes(place: DriverFolders, driver: str) -> None:
    assert (await select_driver(spec(isolation={"driver": driver}), place)).name == "process"


async def test_a_pool_that_demands_a_vm_never_gets_less(place: DriverFolders) -> None:
    error = await refused(spec(isolation={"minimum": "MicroVM"}), place)
    assert error.problem.where == "spec.templates[0].image"
    image(place)
    error = await refused(spec({"image": "python"}, isolation={"minimum": "MicroVM"}), place)
    assert "qemu-system-x86_64" in error.problem.what


async def test_a_pool_that_accepts_processes_gets_them_where_no_vm_can_be(
    place: DriverFolders, caplog: pytest.LogCaptureFixture
) -> None:
    image(place)
    assert (await select_driver(spec({"image": "python"}), place)).name == "process"
    assert "qemu-system-x86_64" in caplog.text


async def test_vms_that_crash_are_counted_to_the_pools_threshold(
    place: DriverFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = QemuDriver(scratch=place.scratch, images={}, machine=QemuConfig(tsc_khz=1))

    async def machines(_spec: EnvPoolSpec, _place: DriverFolders) -> QemuDriver:
        return made

    monkeypatch.setitem(vars(selection), "_qemu", machines)
    fields = {"isolation": {"driver": "QemuMicroVM"}}
    assert await select_driver(spec(**fields), place) is made
    assert made.quarantine.threshold == 5

    await select_driver(spec(health={"crashLoopThreshold": 2}, **fields), place)

    assert made.quarantine.threshold == 2
    error = await refused(spec(health={"crashLoopThreshold": 2}), place)
    assert error.problem.where == "spec.health.crashLoopThreshold"


async def test_a_named_driver_is_that_driver_or_an_error(place: DriverFolders) -> None:
    image(place)
    pool = spec({"image": "python"}, isolation={"driver": "QemuMicroVM"})
    assert (await refused(pool, place)).problem.where == "spec.isolation.driver"


async def test_processes_refuse_images(place: DriverFolders) -> None:
    pool = spec({"image": "python"}, isolation={"driver": "Process"})
    assert (await refused(pool, place)).problem.where == "spec.templates[0].image"


async def test_a_slot_sets_the_limits_of_processes_and_leaves_the_others(
    place: DriverFolders,
) -> None:
    slot = {"memoryMib": 2048, "processes": 500, "fileMib": 300, "temporaryMib": 1000}
    found = await select_driver(spec(isolation={"driver": "Process"}, slot=slot), place)
    assert isinstance(found, ProcessDriver)
    assert found.limits == CommandLimits(
        memory_bytes=2 << 30,
        address_bytes=32 << 30,
        processes=500,
        open_files=CommandLimits().open_files,
        file_bytes=300 << 20,
        temporary_bytes=1000 << 20,
    )
    plain = await select_driver(spec(isolation={"driver": "Process"}), place)
    assert isinstance(plain, ProcessDriver)
    assert plain.limits == CommandLimits()


async def test_guests_refuse_a_limit_that_they_do_not_set(
    place: DriverFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def machines(_spec: EnvPoolSpec, _place: DriverFolders) -> QemuDriver:
        return QemuDriver(scratch=place.scratch, images={}, machine=QemuConfig(tsc_khz=1))

    monkeypatch.setitem(vars(selection), "_qemu", machines)
    pool = spec(isolation={"driver": "QemuMicroVM"}, slot={"temporaryMib": 100})
    assert (await refused(pool, place)).problem.where == "spec.slot.temporaryMib"


async def test_processes_refuse_a_disk_of_their_own(place: DriverFolders) -> None:
    pool = spec(isolation={"driver": "Process"}, slot={"diskMib": 1024})
    assert (await refused(pool, place)).problem.where == "spec.slot.diskMib"


def test_guests_have_the_limits_of_their_slot_and_none_on_address_space() -> None:
    given = selection._guest_limits(Slot(processes=100, open_files=200, file_mib=3))
    assert (given.processes, given.open_files, given.file_bytes) == (100, 200, 3 << 20)
    unset = selection._guest_limits(Slot())
    assert (unset.processes, unset.open_files, unset.file_bytes) == (512, 4096, 1 << 30)
    assert given.memory_bytes == unset.memory_bytes == 0


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("other", "there is no image 'other'"),
        ("file:///no/such/folder", "/no/such/folder"),
    ],
)
async def test_an_image_that_cannot_be_booted_is_named(
    place: DriverFolders, name: str, what: str
) -> None:
    image(place, files=("vmlinuz",))
    error = await refused(spec({"image": name}, isolation={"driver": "QemuMicroVM"}), place)
    assert error.problem.where == "spec.templates[0].image"
    assert what in error.problem.what


@pytest.mark.parametrize("driver", ["QemuMicroVM", "Firecracker"])
async def test_an_image_whose_guests_would_mount_no_disk_is_to_be_built_again(
    place: DriverFolders, driver: str
) -> None:
    image(place, guest=1)
    error = await refused(spec({"image": "python"}, isolation={"driver": driver}), place)
    assert error.problem.where == "spec.templates[0].image"
    assert "guests have no disk" in error.problem.what
    assert "etude images build" in error.problem.fix


async def test_a_damaged_image_is_no_image(place: DriverFolders) -> None:
    (image(place) / "manifest.json").write_text("{")
    error = await refused(spec({"image": "python"}, isolation={"driver": "QemuMicroVM"}), place)
    assert error.problem.fix == "build it again"


async def test_gvisor_is_taken_by_name_or_where_a_pool_accepts_no_less(
    place: DriverFolders,
) -> None:
    image(place)
    for isolation in ({"driver": "GVisor"}, {"minimum": "Sandbox"}):
        error = await refused(spec({"image": "python"}, isolation=isolation), place)
        wanted = "runsc is not installed" if os.geteuid() == 0 else "made by root"
        assert wanted in error.problem.what


def with_gvisor(place: DriverFolders) -> None:
    program = place.scratch.parent / "runsc"
    program.write_text("#!/bin/sh\necho runsc version release-20250505.0\n")
    program.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="containers of gVisor need root")
async def test_a_pool_that_accepts_processes_is_not_refused_for_what_gvisor_has_not(
    place: DriverFolders,
) -> None:
    image(place)
    with_gvisor(place)
    assert (await select_driver(spec({"image": "python"}), place)).name == "gvisor"
    driver = await select_driver(spec({"image": "python"}, network={"egress": "Public"}), place)
    assert (driver.name, driver.caps.egress) == ("process", True)


async def test_a_pool_that_needs_a_way_out_of_a_sandbox_is_told_who_gives_one(
    place: DriverFolders,
) -> None:
    image(place)
    with_gvisor(place)
    pool = spec({"image": "python"}, isolation={"minimum": "Sandbox"}, network={"egress": "Public"})
    problem = (await refused(pool, place)).problem
    assert problem.where == "spec.network.egress"
    assert "QemuMicroVM" in problem.fix


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("runsc version release-20250505.0\nspec: 1.1.0-rc.1\n", ""),
        ("runsc version 20250503.0\nspec: 1.1.0-rc.1\n", ""),
        ("runsc version 0.0~20221219.0\nspec: 1.0.2-dev\n", "release of 20221219 refuses calls"),
        ("runsc version VERSION_MISSING\n", "no date"),
        ("", "no date"),
    ],
)
def test_a_release_of_gvisor_that_breaks_programs_is_not_used(said: str, why: str) -> None:
    found = runsc.version_problem(said)
    assert (why in found) if why else not found


def programs(place: DriverFolders, versions: dict[str, str]) -> Path:
    """Programs that say a version, and a device; where they are found."""
    folder = place.scratch.parent
    for name, version in versions.items():
        (folder / name).write_text(f"#!/bin/sh\necho '{name} v{version}'\n")
        (folder / name).chmod(0o755)
    device = folder / "kvm"
    device.touch()
    return device


async def test_firecracker_is_taken_by_name_and_says_what_is_missing(place: DriverFolders) -> None:
    image(place)
    pool = spec({"image": "python"}, isolation={"driver": "Firecracker"})
    error = await refused(pool, place)
    assert error.problem.where == "spec.isolation.driver"
    assert "firecracker and jailer: not on PATH" in error.problem.what


@pytest.mark.parametrize(
    ("versions", "what"),
    [
        ({"firecracker": "1.13.1"}, "jailer: not on PATH"),
        ({"firecracker": "1.12.0", "jailer": "1.12.0"}, "needs 1.13 or later"),
        ({"firecracker": "1.13.0", "jailer": "1.13.1"}, "not of the same release"),
        ({"firecracker": "one", "jailer": "1.13.1"}, "says"),
    ],
)
def test_programs_that_do_not_fit_are_named(
    place: DriverFolders, versions: dict[str, str], what: str
) -> None:
    device = programs(place, versions)
    with pytest.raises(VmmError, match=what):
        compatibility.find_programs(place.scratch.parent, kvm=device)


def test_firecracker_runs_nothing_without_the_processors_machines(place: DriverFolders) -> None:
    device = programs(place, {"firecracker": "1.14.0", "jailer": "1.14.0"})
    with pytest.raises(VmmError, match=r"no-kvm cannot be opened"):
        compatibility.find_programs(place.scratch.parent, kvm=device.with_name("no-kvm"))


@pytest.mark.skipif(os.geteuid() != 0, reason="the jailer needs root")
def test_programs_of_one_release_on_a_host_with_kvm_are_taken(place: DriverFolders) -> None:
    device = programs(place, {"firecracker": "1.14.0", "jailer": "1.14.0"})
    found = compatibility.find_programs(place.scratch.parent, kvm=device)
    assert found.jailer == (place.scratch.parent / "jailer").resolve()
