"""The cache of images: complete or absent, whatever happens to its builders."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.envserver.images.build_cache import BuildCache


def fill(folder: Path) -> None:
    (folder / "file").write_text("content")


def test_an_entry_is_built_once(tmp_path: Path) -> None:
    cache, built = BuildCache(tmp_path), []

    def build(folder: Path) -> None:
        built.append(folder)
        fill(folder)

    first = cache.entry("images", "a", build)
    assert cache.entry("images", "a", build) == first == cache.find("images", "a")
    assert len(built) == 1
    assert (first / "file").read_text() == "content"


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path)

    def fails(folder: Path) -> None:
        fill(folder)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.entry("images", "a", fails)
    assert cache.find("images", "a") is None
    assert not list((tmp_path / "partial").iterdir())
    cache.entry("images", "a", fill)


BUILDER = """
import sys, time
from pathlib import Path
from etude.envserver.images.build_cache import BuildCache

def build(folder):
    with Path(sys.argv[1], "builders").open("a") as log:
        log.write("x")
    (folder / "file").write_text("content")
    time.sleep(float(sys.argv[2]))

BuildCache(Path(sys.argv[1])).entry("images", "a", build)
"""


def builder(root: Path, *, takes_s: float) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(root), str(takes_s)])


def test_a_killed_builder_leaves_no_entry_and_holds_up_nobody(tmp_path: Path) -> None:
    killed = builder(tmp_path, takes_s=600)
    while not (tmp_path / "partial" / "images-a" / "file").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    cache = BuildCache(tmp_path)
    assert cache.find("images", "a") is None

    def build(folder: Path) -> None:
        assert not list(folder.iterdir()), "what the killed builder left"
        fill(folder)

    cache.entry("images", "a", build)


def test_builders_at_once_build_once(tmp_path: Path) -> None:
    builders = [builder(tmp_path, takes_s=0.2) for _ in range(3)]
    assert [each.wait() for each in builders] == [0, 0, 0]
    assert (tmp_path / "builders").read_text() == "x"


def test_nobody_else_can_run_the_programs_of_a_root(tmp_path: Path) -> None:
    path = BuildCache(tmp_path).entry("rootfs", "a", fill)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "partial").stat().st_mode & 0o777 == 0o700


def test_entries_come_oldest_first(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path)
    for number, name in enumerate(("c", "a", "b")):
        path = cache.entry("images", name, fill)
        os.utime(path, (number, number))
    assert [path.name for path in cache.entries("images")] == ["c", "a", "b"]
    assert cache.entries("kernels") == []
