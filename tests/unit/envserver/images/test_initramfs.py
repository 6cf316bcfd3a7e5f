"""The first file system of a guest, read back with a reader of its own."""

import gzip
import stat
from pathlib import Path
from typing import NamedTuple

import pytest

from etude.envserver.images.guest_kernel import MODULES
from etude.envserver.images.initramfs import AGENT, INIT, initramfs


class Entry(NamedTuple):
    mode: int
    device: tuple[int, int]
    content: bytes


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    for number, name in enumerate(MODULES):
        (tmp_path / f"{name}.ko").write_bytes(name.encode() * (number + 1))
    return tmp_path


def entries(archive: bytes) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    at = 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        mode, size, length = fields[1], fields[6], fields[11]
        name = archive[at + 110 : at + 110 + length - 1].decode()
        at = (at + 110 + length + 3) // 4 * 4
        if name == "TRAILER!!!":
            return found
        found[name] = Entry(mode, (fields[9], fields[10]), archive[at : at + size])
        at = (at + size + 3) // 4 * 4


def test_it_holds_busybox_a_script_and_every_module(modules: Path) -> None:
    found = entries(gzip.decompress(initramfs(busybox=b"BUSY", modules=modules)))
    assert found["bin/busybox"].content == b"BUSY"
    assert stat.S_IMODE(found["init"].mode) == 0o755
    assert found["init"].content == INIT.encode()
    assert found["dev/console"].device == (5, 1)
    for number, name in enumerate(MODULES):
        assert found[f"modules/{name}.ko"].content == name.encode() * (number + 1)


def test_the_same_input_makes_the_same_bytes(modules: Path) -> None:
    assert initramfs(busybox=b"B", modules=modules) == initramfs(busybox=b"B", modules=modules)


def test_the_script_ends_in_the_agent() -> None:
    assert INIT.endswith(f"switch_root /root {AGENT}\n")
