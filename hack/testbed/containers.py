"""Builds a target of the Containerfile without Docker and without a registry.

`python hack/testbed/containers.py operator operator.tar` writes a docker archive, which
`testbed.py image --archive operator.tar` brings to a node.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import build

ROOT = Path(__file__).parents[2]
STORAGE = build.CACHE / "buildah"
BASE = "localhost/debian-python:1"
"""In place of an image from a registry: Debian with Python, made by debootstrap."""
PACKAGES = ("python3", "python3-venv", "ca-certificates")
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
BUILDAH = (
    *("buildah", "--root", str(STORAGE / "root"), "--runroot", str(STORAGE / "run")),
    *("--storage-driver", "overlay"),
)


def obstacle() -> str:
    """Why nothing can be built here; empty when it can."""
    if os.geteuid() != 0:
        return "it needs root for debootstrap and chroot"
    absent = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed: run `make system-deps`" if absent else ""


def archive(target: str, path: Path) -> str:
    """Build a target, write it as a docker archive, and answer its name.

    Raises:
        RuntimeError: a program failed; the message is what it said last.
    """
    name = f"localhost/etude-{target}:1"
    STORAGE.mkdir(parents=True, exist_ok=True)
    with (STORAGE / ".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds would fill the storage twice
        _provide_base()
        # The kernel of a container may forbid what an unprivileged build needs: a chroot does.
        how = ("--isolation", "chroot", "--layers", "--timestamp", "0", "--pull-never")
        what = ("--build-arg", f"BASE={BASE}", "--target", target, "--tag", name, str(ROOT))
        _run(*BUILDAH, "build", *how, *what)
        path.unlink(missing_ok=True)
        _run(*BUILDAH, "push", "--quiet", name, f"docker-archive:{path.absolute()}:{name}")
    return name


def _provide_base() -> None:
    known = (*BUILDAH, "inspect", "--type", "image", BASE)
    if subprocess.run(known, capture_output=True, check=False).returncode == 0:
        return
    with tempfile.TemporaryDirectory(prefix="etude-debian-") as folder:
        # A new root begins readable for its owner only, and so would be the image's.
        root = Path(folder) / "root"
        include = f"--include={','.join(PACKAGES)}"
        _run("debootstrap", "--variant=minbase", include, SUITE, str(root), MIRROR)
        for passing in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(root / passing)
        # Where downloads pass a proxy that signs them itself, this machine knows its authority.
        shutil.copy(Path("/") / CERTIFICATES, root / CERTIFICATES)
        container = _run(*BUILDAH, "from", "scratch").strip()
        _run(*BUILDAH, "add", "--quiet", container, str(root), "/")
        _run(*BUILDAH, "commit", "--quiet", "--rm", container, BASE)


def _run(*words: str) -> str:
    done = subprocess.run(("nice", *words), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{words[0]}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def main() -> int:
    """Build one target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="a target of the Containerfile")
    parser.add_argument("archive", type=Path, help="where to write it")
    arguments = parser.parse_args()
    if reason := obstacle():
        sys.stderr.write(f"containers: nothing can be built here: {reason}\n")
        return 69  # EX_UNAVAILABLE: tests skip on it, anything else is a failure
    print(archive(arguments.target, arguments.archive))
    return 0


if __name__ == "__main__":
    sys.exit(main())
