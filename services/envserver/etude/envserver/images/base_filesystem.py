"""Base of a root file system: Debian's archive, busybox, or an OCI layout."""

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from etude.common.errors import Problem, UserError
from etude.envserver.images import host_programs
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.layers import RootFilesystem
from etude.envserver.images.pull import unpacking
from etude.envserver.images.spec import DebianBase, ImageBase, digest

_DEBOOTSTRAP_LIMIT_S = 3_600.0
_LEFTOVERS = (
    *("etc/resolv.conf", "etc/hostname", "etc/machine-id", "var/lib/dbus/machine-id"),
    *("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man"),
    *("usr/share/info", "usr/share/locale", "debootstrap"),
)
"""Files that name the host, or that no guest reads."""
_FOLDERS = (
    *("bin", "dev", "etc", "home", "proc", "root", "run", "sbin", "sys", "tmp", "usr/bin"),
    *("usr/sbin", "var/cache/apt", "var/lib/apt/lists", "var/log", "workspace"),
)


def make_base(base: ImageBase, cache: BuildCache, say: Callable[[str], None]) -> RootFilesystem:
    """Make the root file system of a base, unless it is cached.

    Raises:
        UserError: this machine cannot make it; the message says why.
    """
    if os.geteuid() != 0:
        fix = "build as root, or copy a built image's folder into the cache"
        raise UserError(
            Problem("PermissionDenied", "making a root file system needs root", "images", fix)
        )
    if base.debian is not None:
        words = f"debootstrap {base.debian.suite}, {len(base.debian.packages)} packages (minutes)"
        build: Callable[[Path], None] = functools.partial(_debian, base.debian)
        address = digest("debian", base.debian.to_json())
    elif base.oci is not None:
        words = f"unpack {base.oci.digest}"
        build = functools.partial(unpacking.unpack_local, Path(base.oci.layout), base.oci.digest)
        address = digest("oci", base.oci.digest)
    else:
        words, build = "busybox", _busybox
        address = digest("busybox", _busybox_version())
    if cache.find("rootfs", address) is None:
        say(f"root: {words} …")

    def fill(folder: Path) -> None:
        tree = folder / "tree"
        build(tree)
        _finish(tree)

    cache.entry("rootfs", address, fill)
    return RootFilesystem(cache=cache, address=address, layers=(f"rootfs/{address}/tree",))


def _debian(base: DebianBase, tree: Path) -> None:
    tree.mkdir()
    words = ["debootstrap", "--variant=minbase"]
    if base.packages:
        words.append(f"--include={','.join(base.packages)}")
    words += [base.suite, str(tree), base.mirror]
    host_programs.run_program(
        words, what="debootstrap", cwd=tree.parent, timeout_s=_DEBOOTSTRAP_LIMIT_S
    )


def _busybox_version() -> str:
    path = Path(host_programs.find_program("busybox"))
    return digest(path.read_bytes().hex())


def _busybox(tree: Path) -> None:
    source = host_programs.find_program("busybox")
    for name in _FOLDERS:
        (tree / name).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, tree / "bin/busybox")
    (tree / "bin/busybox").chmod(0o755)
    listed = subprocess.run((source, "--list"), capture_output=True, check=True, text=True)
    for applet in listed.stdout.split():
        if applet != "busybox":
            (tree / "bin" / applet).symlink_to("busybox")
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n", encoding="ascii")
    (tree / "etc/group").write_text("root:x:0:\n", encoding="ascii")


def _finish(tree: Path) -> None:
    """Remove files that name the host, and make the folders that mounts need.

    Raises:
        UserError: the root came from outside, and a link in it leads out of it.
    """
    for name in _LEFTOVERS:
        path = _inside(tree, name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for name in _FOLDERS:
        path = _inside(tree, name)
        # Where Debian has a link, as from bin to usr/bin, there is something already.
        if not path.is_symlink():
            path.mkdir(parents=True, exist_ok=True)
    _inside(tree, "tmp/any").parent.chmod(0o1777)
    _inside(tree, "etc/hostname").write_text("sandbox\n", encoding="ascii")
    _inside(tree, "etc/machine-id").write_text("", encoding="ascii")
    tree.chmod(0o755)


def _inside(tree: Path, name: str) -> Path:
    """A path of the tree whose folder is really in it.

    Raises:
        UserError: it is elsewhere.
    """
    path = tree / name
    if not path.parent.resolve().is_relative_to(tree.resolve()):
        what = f"{name!r} leads through a link out of the root"
        fix = "make the link relative, or take it out of the image"
        raise UserError(Problem("InvalidSpec", what, str(tree), fix))
    return path
