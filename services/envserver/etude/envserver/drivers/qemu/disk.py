"""What guests write to: qcow2 layers over an empty file system, without a name on the host.

Each machine writes to a layer of its own, a copy of an empty one (qemu-img takes fifty times as
long). A snapshot puts a new layer on top, and what was written until then is shared read-only.
Not covered: a monitor that was taken over can still write to the layers that were its own, so
forks of one machine trust each other, as they do with its memory.
"""

import functools
import os
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.jail import Jail
from etude.envserver.drivers.qemu.handing import hand_over
from etude.envserver.drivers.qemu.vm import Vm

_PROGRAM = "qemu-img"
_LIMIT_S = 60.0
_DEVICE = "d1"
_MAX_LAYERS = 40
"""A monitor may have 128 files, and each layer is two."""


@dataclass(slots=True)
class Disk:
    """The layers of one machine. It owns its file descriptors."""

    folder: Path
    """Where new layers take their space."""
    size_bytes: int
    top: int
    """Written by the machine."""
    base: tuple[int, ...]
    """Each based on the next, read-only; the last is raw."""

    @property
    def chain(self) -> tuple[int, ...]:
        """All layers, the topmost first."""
        return (self.top, *self.base)

    def close(self) -> None:
        """Give the layers back; what nobody else uses is gone from the disk."""
        for descriptor in self.chain:
            os.close(descriptor)


def over(base: Sequence[int], *, folder: Path, jail: Jail) -> Disk:
    """A disk that shows what is in base, with an empty layer on top.

    Args:
        base: descriptors of the layers below, opened for reading only; the last is raw.
        folder: where the machine's own layer takes its space.
        jail: who writes to it.

    Raises:
        VmmError: there are too many layers, or qemu-img does not work.
    """
    if len(base) >= _MAX_LAYERS:
        raise VmmError(f"a disk has {_MAX_LAYERS} layers at most")
    size_bytes = os.fstat(base[-1]).st_size
    top = _empty_layer(folder, size_bytes, jail)
    return Disk(folder, size_bytes, top, tuple(os.dup(each) for each in base))


def first(upper: Path, *, folder: Path, jail: Jail) -> Disk:
    """The disk that a template boots with.

    Raises:
        VmmError: qemu-img does not work.
    """
    raw = os.open(upper, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return over([raw], folder=folder, jail=jail)
    finally:
        os.close(raw)


def frozen(disk: Disk) -> tuple[int, ...]:
    """All layers of a machine that is gone, or has a newer layer, for reading only."""
    # Nobody's file: machines of other users are to read it.
    os.fchown(disk.top, os.geteuid(), os.getegid())
    os.fchmod(disk.top, stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    return (_read_only(disk.top), *(os.dup(each) for each in disk.base))


class Layering:
    """A new layer for a running machine, put on top within a pause."""

    def __init__(self, vm: Vm, disk: Disk, jail: Jail) -> None:
        self._vm, self._disk, self._jail = vm, disk, jail
        self._next, self._node, self._below = -1, "", ""

    async def prepare(self) -> None:
        """Make the layer known to the monitor, while the guest runs.

        Raises:
            VmmError: the monitor refused it, or there are too many layers.
        """
        if len(self._disk.chain) >= _MAX_LAYERS:
            raise VmmError(f"a disk has {_MAX_LAYERS} layers at most")
        qmp = self._vm.qmp
        self._below = _top_node(await qmp.execute("query-block"))
        self._next = _empty_layer(self._disk.folder, self._disk.size_bytes, self._jail)
        handed = await hand_over(qmp, self._next)
        self._node = f"layer-{len(self._disk.chain)}"
        file = {"driver": "file", "filename": f"/proc/self/fd/{handed.descriptor}"}
        node = {"driver": "qcow2", "node-name": self._node, "file": file, "backing": None}
        await qmp.execute("blockdev-add", node)

    async def put(self) -> None:
        """Write to the new layer from here on. The guest stands still.

        Raises:
            VmmError: the monitor refused.
        """
        nodes = {"node": self._below, "overlay": self._node}
        await self._vm.qmp.execute("blockdev-snapshot", nodes)
        below = frozen(self._disk)
        self._disk.close()
        self._disk.top, self._disk.base = self._next, below

    def shared(self) -> tuple[int, ...]:
        """What was written before `put`, for reading only."""
        return tuple(os.dup(each) for each in self._disk.base)


def _top_node(answer: object) -> str:
    """The node that the guest writes to.

    Raises:
        VmmError: the monitor has no such disk.
    """
    for each in answer if isinstance(answer, list) else ():
        match each:
            case {"device": device, "inserted": {"node-name": str(name)}} if device == _DEVICE:
                return name
            case _:
                continue
    raise VmmError("the monitor has no disk that is written")


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
    """An empty layer over something of this size.

    Raises:
        VmmError: qemu-img is missing or failed.
    """
    with tempfile.TemporaryDirectory(prefix="etude-layer-") as folder:
        path = Path(folder, "empty")
        # What it is based on is said to the monitor by descriptor; the name stands for "something".
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
