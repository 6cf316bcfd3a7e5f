"""The library of stems: who builds it, and what comes of a compiler that does not."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.qemu.fork_server import preload_library


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "node"
    made.mkdir()
    return made


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program that is found as cc; $out is what it is to write, $log a file of the test."""
    programs = tmp_path / "programs"
    programs.mkdir()
    program = programs / "cc"
    words = f'#!/bin/sh\nlog={tmp_path}/log\nwhile [ "$1" != -o ]; do shift; done; out=$2\n'
    program.write_text(words + script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")


def test_two_that_build_at_once_write_files_of_their_own(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each waits until both have begun.
    compiler(
        tmp_path,
        monkeypatch,
        'echo "$out" >> $log\n'
        'while [ $(wc -l < $log) -lt 2 ]; do sleep 0.01; done\necho x > "$out"',
    )
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: preload_library.preload_library(folder), range(2)))
    assert len(set((tmp_path / "log").read_text().split())) == 2
    assert made[0] is not None
    assert made[0] == made[1]
    assert list(folder.iterdir()) == [made[0]]
    assert made[0].read_text() == "x\n"


def test_a_compiler_that_hangs_is_an_error_and_leaves_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, monkeypatch, "exec sleep 600")
    with pytest.raises(VmmError, match="takes longer"):
        preload_library.preload_library(folder, limit_s=0.1)
    assert list(folder.iterdir()) == []


def test_a_compiler_that_fails_means_no_library(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, monkeypatch, "exit 1")
    assert preload_library.preload_library(folder) is None
    assert list(folder.iterdir()) == []


def test_without_a_compiler_there_is_no_library(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preload_library.preload_library(folder) is None
