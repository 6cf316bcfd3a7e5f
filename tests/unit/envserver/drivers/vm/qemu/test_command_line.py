"""The command line of machines, and the rate of the host's counter."""

import itertools
from pathlib import Path

import pytest

from etude.envserver.drivers.vm import host_cpu
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import command_line as machines
from etude.envserver.drivers.vm.qemu.command_line import (
    Accelerator,
    BootFiles,
    QemuConfig,
    VmmFiles,
)

MACHINE = QemuConfig(tsc_khz=2_000_000)
WIRING = VmmFiles(memory=3, qmp=4, agent=5, root=6, disk=10)
BOOT = BootFiles(kernel=7, initramfs=8, console=9)


def test_a_clone_has_the_devices_of_its_template_in_the_same_order() -> None:
    def devices(arguments: tuple[str, ...]) -> list[str]:
        return [after for word, after in itertools.pairwise(arguments) if word in kept]

    kept = {"-M", "-m", "-cpu", "-accel", "-device", "-drive", "-serial"}
    booted = machines.boot_arguments(MACHINE, WIRING, BOOT)
    cloned = machines.clone_arguments(MACHINE, WIRING)
    assert devices(booted) == devices(cloned)


def test_a_clone_waits_stopped_and_cannot_reach_the_templates_memory() -> None:
    cloned = machines.clone_arguments(MACHINE, WIRING)
    assert "-S" in cloned
    assert any(word.endswith("share=off") for word in cloned)
    assert "-kernel" not in cloned


def test_a_larger_translation_cache_changes_nothing_else() -> None:
    one = machines.clone_arguments(MACHINE, WIRING)
    shared = machines.clone_arguments(MACHINE, WIRING, translation_mib=64)
    differing = {(a, b) for a, b in zip(one, shared, strict=True) if a != b}
    assert differing == {("tcg,tb-size=32", "tcg,tb-size=64")}


def test_a_disk_is_an_open_file_behind_the_root_in_boots_and_clones() -> None:
    booted = machines.boot_arguments(MACHINE, WIRING, BOOT)
    for words in (booted, machines.clone_arguments(MACHINE, WIRING)):
        assert words[words.index("-add-fd") + 1] == "fd=10,set=1"
        drives = [after for word, after in itertools.pairwise(words) if word == "-drive"]
        assert [drive.partition(",")[0] for drive in drives] == ["id=d0", "id=d1"]
        assert "readonly=on" in drives[0]
        assert "readonly=on" not in drives[1]


def test_a_boot_is_told_the_counters_rate() -> None:
    booted = machines.boot_arguments(MACHINE, WIRING, BOOT)
    assert "tsc_early_khz=2000000" in booted[booted.index("-append") + 1]


def test_only_translated_guests_have_their_programs_at_the_same_addresses() -> None:
    kvm = QemuConfig(tsc_khz=1, accelerator=Accelerator.KVM)
    for machine, is_fixed in ((MACHINE, True), (kvm, False)):
        booted = machines.boot_arguments(machine, WIRING, BOOT)
        assert ("norandmaps" in booted[booted.index("-append") + 1].split()) is is_fixed


def test_with_kvm_the_guest_has_the_hosts_processor() -> None:
    booted = machines.boot_arguments(
        QemuConfig(tsc_khz=1, accelerator=Accelerator.KVM), WIRING, BOOT
    )
    assert booted[booted.index("-cpu") + 1] == "host"


@pytest.mark.parametrize(
    ("memory_mib", "tsc_khz", "disk_mib"),
    [(63, 1, 64), (1 << 21, 1, 64), (256, 0, 64), (256, 1, 63), (256, 1, 1 << 21)],
)
def test_a_vm_that_cannot_be_is_refused(memory_mib: int, tsc_khz: int, disk_mib: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        QemuConfig(memory_mib=memory_mib, tsc_khz=tsc_khz, disk_mib=disk_mib)


def test_a_jailed_program_comes_last_after_limits_and_user() -> None:
    words = Jail(uid=7, gid=8).command(("qemu", "-S"), memory_bytes=0, file_bytes=5)
    assert words[-2:] == ("qemu", "-S")
    assert "--no-new-privs" in words
    assert "--fsize=5" in words


def test_the_kernels_figure_is_taken_where_the_measurement_agrees(tmp_path: Path) -> None:
    measured = host_cpu.measured_khz()
    near = round(measured * 1.0001)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"cpu MHz\t\t: {measured * 2 / 1000:.3f}\ncpu MHz\t\t: {near / 1000:.3f}\n")
    assert host_cpu.host_tsc_khz(cpuinfo) == near
    cpuinfo.write_text("model name: x\ncpu MHz: fast\n")
    assert host_cpu.host_tsc_khz(cpuinfo) % 1000 == 0
