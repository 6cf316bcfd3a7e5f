"""The first file system of the guest: busybox, modules, and a script that mounts the root."""

import gzip
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from etude.envserver.images.guest_kernel import BOOT_MODULES, MODULES, VSOCK_MODULES

AGENT = "/usr/sbin/guestagent"
"""Process 1 of the guest; it mounts /proc, /sys, /dev and the rest for itself."""

SERVICES = "/etc/guestagent/services"
"""Script that starts the services; process 1 runs it once, and waits for its end."""

INIT = f"""#!/bin/busybox sh
set -e
bb=/bin/busybox
$bb mount -t proc proc /proc
$bb mount -t devtmpfs dev /dev
modules="{" ".join(BOOT_MODULES)}"
for word in $($bb cat /proc/cmdline); do
  case $word in
    envchannel=vsock) modules="$modules {" ".join(VSOCK_MODULES)}" ;;
  esac
done
for module in $modules; do
  $bb insmod /modules/$module.ko
done
$bb mount -t squashfs -o ro /dev/vda /lower
# Without barriers: the host flushes nothing.
$bb mount -t ext4 -o noatime,nobarrier /dev/vdb /rw
$bb mkdir -p /rw/upper /rw/work
$bb mount -t overlay -o lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work overlay /root
# What a policy's command needs none of, and what roads to the guest's root have led over.
echo 0 > /proc/sys/user/max_user_namespaces
echo 1 > /proc/sys/kernel/unprivileged_bpf_disabled
echo 2 > /proc/sys/kernel/kptr_restrict
echo 1 > /proc/sys/kernel/dmesg_restrict
$bb umount /proc
$bb umount /dev
exec $bb switch_root /root {AGENT}
"""
"""Any failure ends process 1, so the kernel panics and the VM ends with its console kept."""

_FOLDERS = ("bin", "dev", "lower", "modules", "proc", "root", "rw")
_CONSOLE = (5, 1)


class _Node(NamedTuple):
    """One entry of the archive."""

    name: str
    mode: int
    content: bytes = b""
    device: tuple[int, int] = (0, 0)


def initramfs(*, busybox: bytes, modules: Path) -> bytes:
    """Pack the archive from a static busybox and a folder of modules; reproducible."""
    archive = b"".join(_packed(_nodes(busybox, modules)))
    return gzip.compress(archive, compresslevel=1, mtime=0)


def _nodes(busybox: bytes, modules: Path) -> Iterator[_Node]:
    for name in _FOLDERS:
        yield _Node(name, stat.S_IFDIR | 0o755)
    # Process 1 needs a console before devtmpfs is mounted.
    yield _Node("dev/console", stat.S_IFCHR | 0o600, device=_CONSOLE)
    yield _Node("bin/busybox", stat.S_IFREG | 0o755, busybox)
    yield _Node("init", stat.S_IFREG | 0o755, INIT.encode())
    for module in MODULES:
        content = (modules / f"{module}.ko").read_bytes()
        yield _Node(f"modules/{module}.ko", stat.S_IFREG | 0o644, content)
    yield _Node("TRAILER!!!", 0)


def _packed(nodes: Iterator[_Node]) -> Iterator[bytes]:
    """The "newc" format of cpio(5): numbers are eight hexadecimal digits, parts fill four bytes."""
    for inode, node in enumerate(nodes, start=1):
        name = node.name.encode() + b"\0"
        fields = (inode, node.mode, 0, 0, 1, 0, len(node.content), 0, 0, *node.device, len(name), 0)
        header = b"070701" + b"".join(b"%08x" % field for field in fields)
        yield _padded(header + name)
        yield _padded(node.content)


def _padded(part: bytes) -> bytes:
    return part + bytes(-len(part) % 4)
