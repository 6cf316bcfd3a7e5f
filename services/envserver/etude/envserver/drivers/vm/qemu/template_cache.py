"""Template cache of QEMU on disk, so that a successor process need not boot again.

templates/<compat_key>/state     keyed digest, address, device state
                      /memory    the non-zero pages of the guest's memory
                      /disk      what it has written

A VMM trusts the files, so none is used before it is verified: the state by its keyed BLAKE3, memory
and disk by the address in the state. While a VM of the template still runs, its memory is taken
from there: it is shared with the VM, and deltas of it stay possible.
"""

import contextlib
import hmac
import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from blake3 import blake3

from etude.envserver.drivers.vm import disk, sealed_files
from etude.envserver.drivers.vm.errors import IntegrityError
from etude.envserver.drivers.vm.qemu.command_line import QemuConfig
from etude.envserver.drivers.vm.qemu.compatibility import compat_key
from etude.envserver.drivers.vm.qemu.template import (
    MAX_DEVICE_BYTES,
    MEMORY_NAME,
    QemuTemplate,
    parse_device_state,
)
from etude.envserver.drivers.vm.template_cache import TemplateCache, template_address
from etude.envserver.images.built_image import BuiltImage

log = logging.getLogger(__name__)

_STATE, _MEMORY = "state", "memory"
_MAX_SHARERS = 3
"""A wrong one costs as much as reading a file."""
_MAGIC = b"ETUDETP1"
_CODE_BYTES = 32
_ADDRESS_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + _CODE_BYTES + _ADDRESS_BYTES
_SEGMENT = struct.Struct(">QQ")
"""Offset in the memory, and size."""
_LINK = f"/memfd:{MEMORY_NAME} "
"""Name of such a file in /proc."""


MemorySharers = Mapping[str, Sequence[int]]


class _CachedState(NamedTuple):
    """State of a template without the memory."""

    address: str
    devices: bytes
    disk_digest: bytes
    """Of the disk that lies with it."""

    def is_of(self, key: str, memory: int) -> bool:
        """Tell whether this memory belongs to it, and its disk too."""
        found = template_address(key, memory, self.devices, self.disk_digest)
        return found == self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuTemplateCache(TemplateCache):
    """Cached templates of one host."""

    def store(self, template: QemuTemplate) -> None:
        """Write a template to the cache. Takes 1 ms a MiB: call it on a thread."""
        with self.replacing(template.compat_key) as folder:
            with (folder / _MEMORY).open("wb") as file:
                for offset, part in sealed_files.nonzero_pages(template.memory):
                    file.write(_SEGMENT.pack(offset, len(part)))
                    file.write(part)
            os.close(disk.copy_open(template.disk, folder / disk.DISK))
            body = bytes.fromhex(template.address) + sealed_files.read_all(template.devices)
            code = blake3(template.compat_key.encode() + body, key=self.key).digest()
            (folder / _STATE).write_bytes(_MAGIC + code + body)

    def find(
        self, image: BuiltImage, machine: QemuConfig, lenders: MemorySharers
    ) -> QemuTemplate | None:
        """Find and verify the template of an image for a VM. Call it on a thread."""
        key = compat_key(machine, image)
        folder = self.folder_of(key)
        with contextlib.ExitStack() as opened:
            try:
                own_disk = disk.open_disk(folder / disk.DISK)
                opened.callback(os.close, own_disk)
                state = self._state(folder, key, own_disk)
                memory = _shared_memory(lenders.get(state.address, ()), state, machine, key)
                if memory is None:
                    memory = _load_memory(folder / _MEMORY, state, machine, key)
            except FileNotFoundError:
                return None
            except IntegrityError as error:
                log.warning("template is booted again: %s", error)
                return None
            opened.pop_all()
        return QemuTemplate(
            address=state.address,
            compat_key=key,
            machine=machine,
            memory=memory,
            devices=sealed_files.create_sealed("devices", [state.devices]),
            stream=parse_device_state(state.devices, machine),
            root=os.open(image.root, os.O_RDONLY | os.O_CLOEXEC),
            disk=own_disk,
        )

    def _state(self, folder: Path, key: str, own_disk: int) -> _CachedState:
        """Load the state without the memory.

        Raises:
            IntegrityError: it was not written by this host for this key.
        """
        with (folder / _STATE).open("rb") as file:
            data = file.read(_HEAD_BYTES + MAX_DEVICE_BYTES + 1)
        code, body = data[len(_MAGIC) :][:_CODE_BYTES], data[len(_MAGIC) + _CODE_BYTES :]
        wanted = blake3(key.encode() + body, key=self.key).digest()
        if not data.startswith(_MAGIC) or not hmac.compare_digest(code, wanted):
            raise IntegrityError(f"{folder / _STATE}: was not written by this host")
        found = disk.digest(own_disk)
        return _CachedState(body[:_ADDRESS_BYTES].hex(), body[_ADDRESS_BYTES:], found)


def _shared_memory(
    lenders: Sequence[int], state: _CachedState, machine: QemuConfig, key: str
) -> int | None:
    """Open the template's memory from a VMM that shares it."""
    for pid in lenders[:_MAX_SHARERS]:
        for memory in _open_memories(pid, machine):
            # Sealed, so it cannot change after the check, whatever its source.
            if sealed_files.is_sealed(memory) and state.is_of(key, memory):
                return memory
            os.close(memory)
    return None


def _open_memories(pid: int, machine: QemuConfig) -> Iterator[int]:
    """Iterate over a VMM's open files that have the size of the guest's memory."""
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if str(link.readlink()).startswith(_LINK):
                memory = os.open(link, os.O_RDWR | os.O_CLOEXEC)
                if os.fstat(memory).st_size == machine.memory_bytes:
                    yield memory
                else:
                    os.close(memory)


def _load_memory(path: Path, state: _CachedState, machine: QemuConfig, key: str) -> int:
    """Load the template's memory from its file.

    Raises:
        IntegrityError: it does not belong to the state.
    """
    with path.open("rb") as file:
        memory = sealed_files.create(MEMORY_NAME, machine.memory_bytes)
        try:
            for offset, part in _segments(file, machine.memory_bytes, path):
                os.pwrite(memory, part, offset)
            sealed_files.seal(memory)
            is_whole = state.is_of(key, memory)
        except BaseException:
            os.close(memory)
            raise
    if not is_whole:
        os.close(memory)
        raise IntegrityError(f"{path}: it or its disk is damaged")
    return memory


def _segments(file: BinaryIO, size_bytes: int, path: Path) -> Iterator[tuple[int, bytes]]:
    """Iterate over the parts of a memory.

    Raises:
        IntegrityError: they do not fit.
    """
    while head := file.read(_SEGMENT.size):
        if len(head) != _SEGMENT.size:
            raise IntegrityError(f"{path}: is cut off")
        offset, size = _SEGMENT.unpack(head)
        if size > sealed_files.PART_BYTES or offset + size > size_bytes:
            raise IntegrityError(f"{path}: has a part outside the memory")
        part = file.read(size)
        if len(part) != size:
            raise IntegrityError(f"{path}: is cut off")
        yield offset, part
