"""Images from nothing, as `etude images build` makes them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.vm import microvms

from etude.common.errors import UserError
from etude.envserver.images import base_filesystem
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.builder import build
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.images.spec import (
    BusyboxBase,
    ImageBase,
    ImageFile,
    ImageSpec,
    SetupStep,
)

BUSYBOX = ImageBase(busybox=BusyboxBase())


@pytest.fixture
def cache(image: BuiltImage, tmp_path: Path) -> BuildCache:
    """An empty cache, but for the kernel that was downloaded already."""
    found = BuildCache(tmp_path / "cache")
    shutil.copytree(image.folder.parents[1] / "kernels", found.root / "kernels")
    return found


def spec(*steps: str, files: tuple[ImageFile, ...] = ()) -> ImageSpec:
    return ImageSpec(
        name="test", base=BUSYBOX, files=files, setup=tuple(SetupStep(run=step) for step in steps)
    )


def unpacked(image: BuiltImage, folder: Path) -> Path:
    words = ("unsquashfs", "-q", "-n", "-d", str(folder), str(image.root))
    subprocess.run(words, check=True, capture_output=True)
    return folder


def test_files_and_what_setup_steps_leave_are_in_the_root(
    cache: BuildCache, tmp_path: Path
) -> None:
    files = (ImageFile(path="/etc/deep/motd", text="hello\n", mode="0600"),)
    wanted = spec("mv /etc/deep/motd /etc/motd", "rm -r /etc/deep; echo two > /two", files=files)
    root = unpacked(build(wanted, agent=microvms.guest_agent(), cache=cache), tmp_path / "root")
    assert (root / "etc/motd").read_text() == "hello\n"
    assert (root / "etc/motd").stat().st_mode & 0o777 == 0o600
    assert (root / "two").read_text() == "two\n"
    assert not (root / "etc/deep").exists()
    assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert (root / "usr/sbin/guestagent").read_bytes() == microvms.guest_agent().read_bytes()


def test_a_second_build_does_nothing_and_a_changed_step_repeats_only_what_follows(
    cache: BuildCache,
) -> None:
    said: list[str] = []
    agent = microvms.guest_agent()
    first = build(spec("echo 1", "echo 2", "echo 3"), agent=agent, cache=cache, say=said.append)
    said.clear()
    assert build(spec("echo 1", "echo 2", "echo 3"), agent=agent, cache=cache) == first
    assert said == []
    build(spec("echo 1", "echo two", "echo 3"), agent=agent, cache=cache, say=said.append)
    assert said == ["setup 2/3: echo two …", "setup 3/3: echo 3 …", "root: pack …"]


def test_a_failed_step_says_which_and_what_it_printed(cache: BuildCache) -> None:
    with pytest.raises(UserError) as caught:
        build(spec("echo so it goes; exit 3"), agent=microvms.guest_agent(), cache=cache)
    assert "setup: echo so it goes" in caught.value.problem.where
    assert "ended with 3\nso it goes" in caught.value.problem.what


def test_a_step_that_takes_too_long_is_ended_with_all_it_started(cache: BuildCache) -> None:
    wanted = ImageSpec(
        name="slow", base=BUSYBOX, setup=(SetupStep(run="sleep 61 & sleep 61", timeout_seconds=1),)
    )
    with pytest.raises(UserError, match="longer than 1 s"):
        build(wanted, agent=microvms.guest_agent(), cache=cache)
    listed = subprocess.run(("ps", "-eo", "args"), capture_output=True, text=True, check=True)
    assert "sleep 61" not in listed.stdout


@pytest.mark.parametrize(
    "step",
    [
        "mount -t tmpfs none /mnt",
        "mknod /disk b 254 0",
        "v=$(cat /proc/sys/kernel/core_pattern); echo $v > /proc/sys/kernel/core_pattern",
        "test $(echo /proc/[0-9]* | wc -w) -gt 5",
        "wget -T 2 http://deb.debian.org",
        f"ls {microvms.ROOT}",
    ],
    ids=["mount", "device", "kernel setting", "other processes", "network", "files"],
)
def test_a_step_cannot_reach_the_host(cache: BuildCache, step: str) -> None:
    with pytest.raises(UserError, match="ended with"):
        build(spec(step), agent=microvms.guest_agent(), cache=cache)


Layer = dict[str, bytes | None]


def test_the_command_line_builds_and_lists(cache: BuildCache, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text("name: tiny\nbase: {busybox: {}}\n")
    command = [sys.executable, "-c", "from etude.cli.main import main; main()", "images"]
    words = ["--agent", str(microvms.guest_agent()), "--cache", str(cache.root)]
    built = subprocess.run(
        [*command, "build", str(path), *words], capture_output=True, text=True, check=True
    )
    assert "root: pack" in built.stderr
    listed = subprocess.run(
        [*command, "ls", "--json", "--cache", str(cache.root)],
        capture_output=True,
        text=True,
        check=True,
    )
    row = json.loads(listed.stdout)
    assert (row["name"], row["folder"]) == ("tiny", built.stdout.strip())
    path.write_text("name: tiny\nbase: {busybox: {}}\ncolour: red\n")
    refused = subprocess.run(
        [*command, "build", str(path), *words], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 4
    assert "colour" in refused.stderr


def test_the_root_of_a_base_is_made_once(cache: BuildCache) -> None:
    said: list[str] = []
    one = base_filesystem.make_base(BUSYBOX, cache, said.append)
    assert base_filesystem.make_base(BUSYBOX, cache, said.append) == one
    assert said == ["root: busybox …"]
