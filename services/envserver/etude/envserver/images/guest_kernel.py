"""The guest's kernel and its modules, from a Debian package that is not installed."""

import shutil
from pathlib import Path

from etude.common.errors import Problem, UserError
from etude.envserver.images import host_programs

BOOT_MODULES = (
    *("virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio_console", "virtio-rng"),
    *("squashfs", "overlay"),
)
"""In the order in which they have to be inserted: each needs only those before it."""
VSOCK_MODULES = ("vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport")
"""After those, where the host talks to its guests over virtio-vsock."""
MODULES = (*BOOT_MODULES, *VSOCK_MODULES)

_DOWNLOAD_LIMIT_S, _UNPACK_LIMIT_S = 600.0, 120.0
_MAX_HOPS = 3
"""A meta package names the package of one kernel version, which may be named by another."""


def fetch_kernel(package: str, target: Path) -> None:
    """Fill a folder with `vmlinuz` and the modules of a Debian kernel package.

    Raises:
        UserError: there is no such package, or no kernel with our modules in it.
    """
    work = target / "work"
    for _ in range(_MAX_HOPS):
        shutil.rmtree(work, ignore_errors=True)
        archive = _download(package, work)
        words = ("dpkg-deb", "-x", str(archive), str(work / "tree"))
        host_programs.run_program(words, what=package, cwd=work, timeout_s=_UNPACK_LIMIT_S)
        if found := sorted((work / "tree" / "boot").glob("vmlinuz-*")):
            _keep(package, found[-1], work / "tree", target)
            shutil.rmtree(work)
            return
        package = _named_by(package, archive)
    raise UserError(_no_kernel(package, "leads to no kernel"))


def _download(package: str, folder: Path) -> Path:
    folder.mkdir()
    # apt's own user could not write into a private folder.
    words = ("apt-get", "-o", "APT::Sandbox::User=root", "-qq", "download", package)
    host_programs.run_program(words, what=package, cwd=folder, timeout_s=_DOWNLOAD_LIMIT_S)
    (archive,) = folder.glob("*.deb")
    return archive


def _named_by(package: str, archive: Path) -> str:
    words = ("dpkg-deb", "-f", str(archive), "Depends")
    depends = host_programs.run_program(
        words, what=package, cwd=archive.parent, timeout_s=_UNPACK_LIMIT_S
    ).strip()
    names = [each.split()[0] for each in depends.split(",") if each.strip()]
    kernels = [name for name in names if name.startswith("linux-image-")]
    if not kernels:
        raise UserError(_no_kernel(package, "has no kernel and depends on none"))
    return kernels[0]


def _keep(package: str, kernel: Path, tree: Path, target: Path) -> None:
    shutil.copyfile(kernel, target / "vmlinuz")
    (target / "modules").mkdir()
    known = {path.stem: path for path in (tree / "lib" / "modules").rglob("*.ko")}
    if missing := [name for name in MODULES if name not in known]:
        raise UserError(_no_kernel(package, f"lacks the modules {', '.join(missing)}"))
    # The file system of the guest's disk.
    if not any("ext4" in path.read_text() for path in tree.rglob("modules.builtin")):
        raise UserError(_no_kernel(package, "has no ext4 built in"))
    for name in MODULES:
        shutil.copyfile(known[name], target / "modules" / f"{name}.ko")


def _no_kernel(package: str, what: str) -> Problem:
    fix = "name a kernel for virtual machines, as linux-image-cloud-amd64"
    return Problem("InvalidSpec", what, f"kernel: {package}", fix)
