"""A node's templates on its disk, so that a successor need not boot them again.

templates/<compat_key>/state     keyed digest, address, device state
                      /memory    the pages of the guest's memory that are not zeros

A monitor trusts both, so neither is used before it is what this node wrote: the state by its keyed
BLAKE3, the memory by the address that is in it. Where a machine of the template still runs, its
memory is taken from there instead: it is shared with the machine, and deltas of it stay possible.
"""

import contextlib
import hmac
import logging
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from blake3 import blake3

from etude.envserver.drivers.machines import sealed
from etude.envserver.drivers.machines.errors import IntegrityError
from etude.envserver.drivers.qemu.compatibility import compat_key
from etude.envserver.drivers.qemu.machine import Machine
from etude.envserver.drivers.qemu.template import (
    MAX_DEVICE_BYTES,
    MEMORY_NAME,
    Template,
    address_of,
    taken_apart,
)
from etude.envserver.images.build import Image

log = logging.getLogger(__name__)

_STATE, _MEMORY = "state", "memory"
_MAX_LENDERS = 3
"""Each that lies costs as much as reading a file."""
_MAGIC = b"ETUDETP1"
_CODE_BYTES = 32
_ADDRESS_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + _CODE_BYTES + _ADDRESS_BYTES
_SEGMENT = struct.Struct(">QQ")
"""Offset in the memory, and size."""
_LINK = f"/memfd:{MEMORY_NAME} "
"""How /proc names such a file."""


Lenders = Mapping[str, Sequence[int]]


class _State(NamedTuple):
    """What is kept beside the memory."""

    address: str
    devices: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The templates of one node."""

    folder: Path
    """Private to the node."""
    key: bytes
    """Known to the node alone."""

    def keep(self, template: Template) -> None:
        """Write a template down. Takes 1 ms a MiB: call it on a thread.

        Raises:
            ValueError: it has a disk, whose layers are not kept.
            OSError: it cannot be written.
        """
        if template.disk:
            raise ValueError("the template of a machine with a disk cannot be kept")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        partial = self.folder / f".{template.compat_key}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        with (partial / _MEMORY).open("wb") as file:
            for offset, part in sealed.pages(template.memory):
                file.write(_SEGMENT.pack(offset, len(part)))
                file.write(part)
        body = bytes.fromhex(template.address) + sealed.content(template.devices)
        code = blake3(template.compat_key.encode() + body, key=self.key).digest()
        (partial / _STATE).write_bytes(_MAGIC + code + body)
        shutil.rmtree(self.folder / template.compat_key, ignore_errors=True)
        partial.rename(self.folder / template.compat_key)

    def find(self, image: Image, machine: Machine, lenders: Lenders) -> Template | None:
        """The template of an image for a machine, if it is kept and sound. Call it on a thread.

        Args:
            image: what it was booted from.
            machine: what it has.
            lenders: monitors that may have a template's memory open, by its address.

        Raises:
            VmmError: there is no monitor.
            OSError: memory ended.
        """
        key = compat_key(machine, image)
        folder = self.folder / key
        try:
            state = self._state(folder, key)
            memory = _lent(lenders.get(state.address, ()), state, machine, key)
            if memory is None:
                memory = _loaded(folder / _MEMORY, state, machine, key)
        except FileNotFoundError:
            return None
        except IntegrityError as error:
            log.warning("a template is booted again: %s", error)
            return None
        return Template(
            address=state.address,
            compat_key=key,
            machine=machine,
            memory=memory,
            devices=sealed.filled("devices", [state.devices]),
            stream=taken_apart(state.devices, machine),
            root=os.open(image.root, os.O_RDONLY | os.O_CLOEXEC),
        )

    def _state(self, folder: Path, key: str) -> _State:
        """What was kept beside the memory.

        Raises:
            FileNotFoundError: nothing was.
            IntegrityError: it is not what this node wrote for this key.
        """
        with (folder / _STATE).open("rb") as file:
            data = file.read(_HEAD_BYTES + MAX_DEVICE_BYTES + 1)
        code, body = data[len(_MAGIC) :][:_CODE_BYTES], data[len(_MAGIC) + _CODE_BYTES :]
        wanted = blake3(key.encode() + body, key=self.key).digest()
        if not data.startswith(_MAGIC) or not hmac.compare_digest(code, wanted):
            raise IntegrityError(f"{folder / _STATE}: is not what this node wrote")
        return _State(body[:_ADDRESS_BYTES].hex(), body[_ADDRESS_BYTES:])


def _lent(lenders: Sequence[int], state: _State, machine: Machine, key: str) -> int | None:
    """The template's memory, opened once more from a monitor that has it."""
    for pid in lenders[:_MAX_LENDERS]:
        for memory in _memories(pid, machine):
            # What is sealed cannot change after it was looked at, whoever gave it to us.
            if sealed.is_sealed(memory) and address_of(key, memory, state.devices) == state.address:
                return memory
            os.close(memory)
    return None


def _memories(pid: int, machine: Machine) -> Iterator[int]:
    """Files that a monitor has open and that have the size of the guest's memory."""
    with contextlib.suppress(OSError):  # it ended meanwhile
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if str(link.readlink()).startswith(_LINK):
                memory = os.open(link, os.O_RDWR | os.O_CLOEXEC)
                if os.fstat(memory).st_size == machine.memory_bytes:
                    yield memory
                else:
                    os.close(memory)


def _loaded(path: Path, state: _State, machine: Machine, key: str) -> int:
    """The template's memory from its file.

    Raises:
        FileNotFoundError: there is none.
        IntegrityError: it is not the memory that the state belongs to.
    """
    with path.open("rb") as file:
        memory = sealed.create(MEMORY_NAME, machine.memory_bytes)
        try:
            for offset, part in _segments(file, machine.memory_bytes, path):
                os.pwrite(memory, part, offset)
            sealed.seal(memory)
            found = address_of(key, memory, state.devices)
        except BaseException:
            os.close(memory)
            raise
    if found != state.address:
        os.close(memory)
        raise IntegrityError(f"{path}: is damaged")
    return memory


def _segments(file: BinaryIO, size_bytes: int, path: Path) -> Iterator[tuple[int, bytes]]:
    """The parts of a memory.

    Raises:
        IntegrityError: they do not fit into it.
    """
    while head := file.read(_SEGMENT.size):
        if len(head) != _SEGMENT.size:
            raise IntegrityError(f"{path}: is cut off")
        offset, size = _SEGMENT.unpack(head)
        if size > sealed.PART_BYTES or offset + size > size_bytes:
            raise IntegrityError(f"{path}: has a part outside the memory")
        part = file.read(size)
        if len(part) != size:
            raise IntegrityError(f"{path}: is cut off")
        yield offset, part
