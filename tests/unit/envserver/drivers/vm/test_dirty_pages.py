"""Changed pages of a real process that maps a sealed file privately, as a monitor does."""

import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.drivers.vm import sealed_files
from etude.envserver.drivers.vm.dirty_pages import PageBuffer, read_dirty_pages
from etude.envserver.drivers.vm.errors import VmmError

PAGE = mmap.PAGESIZE
COUNT = 4096
MONITOR = """
import mmap, sys
memory = mmap.mmap(int(sys.argv[1]), 0, flags=mmap.MAP_PRIVATE)
for line in sys.stdin:
    words = line.split()
    for number in map(int, words[1:]):
        if words[0] == "write":
            memory[number * 4096] = number % 251 + 1
        else:
            memory[number * 4096 + 1]
    print(flush=True)
"""


class Mapped(NamedTuple):
    process: "subprocess.Popen[str]"
    memory: int

    def do(self, *words: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        self.process.stdout.readline()


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    memory = sealed_files.create_sealed("template", [random.Random(1).randbytes(COUNT * PAGE)])
    process = subprocess.Popen(
        [sys.executable, "-c", MONITOR, str(memory)],
        pass_fds=(memory,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = Mapped(process, memory)
    found.do("read", 0)
    yield found
    process.kill()
    process.communicate()
    os.close(memory)


def test_only_written_pages_are_changed_and_their_content_is_the_processes(mapped: Mapped) -> None:
    written = sorted({0, 1, 2, 700, COUNT - 1} | set(range(1000, COUNT, 2)))
    mapped.do("read", *range(COUNT))
    mapped.do("write", *written)
    found = read_dirty_pages(mapped.process.pid, mapped.memory, PageBuffer(PAGE))
    assert list(found.numbers) == written
    before = sealed_files.read_all(mapped.memory)
    for index, number in enumerate(written):
        page = bytes(found.content[index * PAGE : (index + 1) * PAGE])
        assert page == bytes([number % 251 + 1]) + before[number * PAGE + 1 : (number + 1) * PAGE]


def test_an_untouched_clone_has_no_changed_page(mapped: Mapped) -> None:
    found = read_dirty_pages(mapped.process.pid, mapped.memory, PageBuffer(PAGE))
    assert found.numbers == ()


def test_a_process_that_does_not_map_the_memory_is_refused(mapped: Mapped) -> None:
    with pytest.raises(VmmError, match="has not mapped"):
        read_dirty_pages(os.getpid(), mapped.memory, PageBuffer(PAGE))


def test_a_process_that_is_gone_is_refused(mapped: Mapped) -> None:
    mapped.process.kill()
    mapped.process.wait()
    with pytest.raises(VmmError):
        read_dirty_pages(mapped.process.pid, mapped.memory, PageBuffer(PAGE))


def test_a_sealed_file_takes_no_change_and_shares_no_writable_mapping(mapped: Mapped) -> None:
    assert sealed_files.is_sealed(mapped.memory)
    with pytest.raises(PermissionError):
        os.pwrite(mapped.memory, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(mapped.memory, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(mapped.memory, 0)


@given(st.dictionaries(st.integers(0, 63), st.sampled_from([b"", b"x", b"y" * PAGE]), max_size=12))
def test_the_pages_of_a_file_are_those_with_something_in_them(written: dict[int, bytes]) -> None:
    memory = sealed_files.create("sparse", 64 * PAGE)
    for number, content in written.items():
        # Also zeros: a page that was only read looks the same to the kernel.
        os.pwrite(memory, content.ljust(PAGE, b"\0"), number * PAGE)
    found = {
        (offset + at) // PAGE: bytes(run[at : at + PAGE])
        for offset, run in sealed_files.nonzero_pages(memory)
        for at in range(0, len(run), PAGE)
    }
    os.close(memory)
    assert found == {
        number: content.ljust(PAGE, b"\0") for number, content in written.items() if content
    }
