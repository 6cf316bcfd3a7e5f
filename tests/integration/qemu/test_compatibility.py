"""What a snapshot is bound to."""

import dataclasses

import pytest
from tests.support.vm import microvms

from etude.envserver.drivers.vm.qemu.command_line import Accelerator, QemuConfig
from etude.envserver.drivers.vm.qemu.compatibility import compat_key, qemu_version
from etude.envserver.images.built_image import BuiltImage

MACHINE = microvms.small_machine()


def test_the_same_machine_and_image_have_the_same_key(image: BuiltImage) -> None:
    assert compat_key(MACHINE, image) == compat_key(dataclasses.replace(MACHINE), image)
    assert qemu_version().startswith("QEMU emulator version")


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(MACHINE, memory_mib=512),
        dataclasses.replace(MACHINE, tsc_khz=MACHINE.tsc_khz + 1),
        dataclasses.replace(MACHINE, disk_mib=512),
        dataclasses.replace(MACHINE, accelerator=Accelerator.KVM),
    ],
    ids=["memory", "counter", "disk", "accelerator"],
)
def test_another_machine_has_another_key(image: BuiltImage, other: QemuConfig) -> None:
    assert compat_key(MACHINE, image) != compat_key(other, image)


@pytest.mark.parametrize("name", ["vmlinuz", "initramfs.gz", "root.sqsh"])
def test_another_image_has_another_key(image: BuiltImage, name: str) -> None:
    other = dataclasses.replace(image, files={**image.files, name: "0" * 64})
    assert compat_key(MACHINE, image) != compat_key(MACHINE, other)
