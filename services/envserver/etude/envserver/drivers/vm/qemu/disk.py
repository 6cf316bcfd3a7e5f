"""Disks of guests: qcow2 layers over an empty file system, without a name on the machine.

Each VM writes to a layer of its own, a copy of an empty one (qemu-img takes fifty times as long). A
snapshot puts a new layer on top, and shares the layers below read-only.
Not covered: a compromised VMM can still write to its former layers, so forks of one VM trust each
other, as they do with its memory.
"""

import functools
import os
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu.qmp import pass_file
from etude.envserver.drivers.vm.qemu.vm import QemuVm

_PROGRAM = "qemu-img"
_LIMIT_S = 60.0
_DEVICE = "d1"
_MAX_LAYERS = 40
"""A VMM may open 128 files, and each layer needs two."""


@dataclass(slots=True)
class QemuDisk:
    """Layers of one VM's disk. It owns its file descriptors."""

    folder: Path
    """Folder on whose file system new layers are."""
    size_bytes: int
    top: int
    """Layer that the VM writes."""
    base: tuple[int, ...]
    """Layers below, top first, read-only; the last is raw."""

    @property
    def chain(self) -> tuple[int, ...]:
        """All layers, top first."""
        return (self.top, *self.base)

    def close(self) -> None:
        """Close the layers; unused ones are gone from the disk."""
        for descriptor in self.chain:
            os.close(descriptor)


def layered_disk(base: Sequence[int], *, folder: Path, jail: Jail) -> QemuDisk:
    """Make a disk with an empty layer on top of others.

    Args:
        base: descriptors of the layers below, read-only; the last is raw.
        folder: folder on whose file system the new layer is.
        jail: user that writes to it.

    Raises:
        VmmError: there are too many layers, or qemu-img fails.
    """
    if len(base) >= _MAX_LAYERS:
        raise VmmError(f"a disk has {_MAX_LAYERS} layers at most")
    size_bytes = os.fstat(base[-1]).st_size
    top = _empty_layer(folder, size_bytes, jail)
    return QemuDisk(folder, size_bytes, top, tuple(os.dup(each) for each in base))


def boot_disk(upper: Path, *, folder: Path, jail: Jail) -> QemuDisk:
    """Make the disk that a template boots with."""
    raw = os.open(upper, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return layered_disk([raw], folder=folder, jail=jail)
    finally:
        os.close(raw)


def freeze_layers(disk: QemuDisk) -> tuple[int, ...]:
    """Freeze all layers of a VM that has ended or has a newer layer; returns them read-only."""
    # Owned by this process: VMs of other users read it.
    os.fchown(disk.top, os.geteuid(), os.getegid())
    os.fchmod(disk.top, stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    return (_read_only(disk.top), *(os.dup(each) for each in disk.base))


class NextLayer:
    """New layer for a running VM, put on top during a pause."""

    def __init__(self, vm: QemuVm, disk: QemuDisk, jail: Jail) -> None:
        self._vm, self._disk, self._jail = vm, disk, jail
        self._next, self._node, self._below = -1, "", ""

    async def prepare(self) -> None:
        """Give the layer to the VMM, while the guest runs.

        Raises:
            VmmError: the VMM refused it, or there are too many layers.
        """
        if len(self._disk.chain) >= _MAX_LAYERS:
            raise VmmError(f"a disk has {_MAX_LAYERS} layers at most")
        qmp = self._vm.qmp
        self._below = _top_node(await qmp.execute("query-block"))
        self._next = _empty_layer(self._disk.folder, self._disk.size_bytes, self._jail)
        handed = await pass_file(qmp, self._next)
        self._node = f"layer-{len(self._disk.chain)}"
        file = {"driver": "file", "filename": f"/proc/self/fd/{handed.descriptor}"}
        node = {"driver": "qcow2", "node-name": self._node, "file": file, "backing": None}
        await qmp.execute("blockdev-add", node)

    async def activate(self) -> None:
        """Write to the new layer from here on. The guest is paused."""
        nodes = {"node": self._below, "overlay": self._node}
        await self._vm.qmp.execute("blockdev-snapshot", nodes)
        below = freeze_layers(self._disk)
        self._disk.close()
        self._disk.top, self._disk.base = self._next, below

    def shared_layers(self) -> tuple[int, ...]:
        """Duplicate the layers below the new one, read-only."""
        return tuple(os.dup(each) for each in self._disk.base)


def _top_node(answer: object) -> str:
    """Find the block node that the guest writes to.

    Raises:
        VmmError: there is none.
    """
    for each in answer if isinstance(answer, list) else ():
        match each:
            case {"device": device, "inserted": {"node-name": str(name)}} if device == _DEVICE:
                return name
            case _:
                continue
    raise VmmError("the VMM has no writable disk")


def _empty_layer(folder: Path, size_bytes: int, jail: Jail) -> int:
    descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, _empty(size_bytes))
        if os.geteuid() == 0:
            os.fchown(descriptor, jail.uid, jail.gid)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@functools.cache
def _empty(size_bytes: int) -> bytes:
    """Make the content of an empty layer for a disk of this size.

    Raises:
        VmmError: qemu-img is missing or fails.
    """
    with tempfile.TemporaryDirectory(prefix="etude-layer-") as folder:
        path = Path(folder, "empty")
        # The layers below are given to the VMM as descriptors; the name is a placeholder.
        words = (*(_PROGRAM, "create", "-q", "-u", "-f", "qcow2"), *("-F", "raw", "-b", "base"))
        try:
            subprocess.run(
                (*words, str(path), str(size_bytes)),
                check=True,
                capture_output=True,
                timeout=_LIMIT_S,
            )
        except (OSError, subprocess.SubprocessError) as cause:
            raise VmmError(f"{_PROGRAM}: {cause}") from cause
        return path.read_bytes()


def _read_only(descriptor: int) -> int:
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
