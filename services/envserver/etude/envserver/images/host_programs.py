"""Programs of the host that building needs, with errors that name the missing package."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.common.errors import Problem, UserError

SQUASHFS_OPTIONS = ("-comp", "lz4", "-noappend", "-quiet", "-no-progress", "-mkfs-time", "0")
"""lz4: the guest unpacks it with emulated instructions; zstd is a third smaller and slower."""
_TAIL_CHARACTERS = 2_000
_PACKAGES = {
    "apt-get": "apt",
    "buildah": "buildah",
    "busybox": "busybox-static",
    "debootstrap": "debootstrap",
    "dpkg-deb": "dpkg",
    "mksquashfs": "squashfs-tools",
    "prlimit": "util-linux",
    "skopeo": "skopeo",
    "umoci": "umoci",
    "unshare": "util-linux",
    "unsquashfs": "squashfs-tools",
}
"""Debian package of each program."""


def find_program(program: str) -> str:
    """Find a program.

    Raises:
        UserError: it is not installed.
    """
    # Users' PATH lacks the folders where Debian keeps debootstrap and mke2fs.
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if found is None:
        fix = f"apt-get install {_PACKAGES[program]}, or in the repository: make system-deps"
        raise UserError(Problem("ProgramMissing", "is not installed", program, fix))
    return found


def run_program(
    words: Sequence[str],
    *,
    what: str,
    cwd: Path,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a program to its end, in this process's environment unless given; returns its stdout.

    Raises:
        UserError: it failed or took too long; the message ends with its last words.
    """
    command = (find_program(words[0]), *words[1:])
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as cause:
        raise UserError(
            build_failure(what, f"took longer than {timeout_s:.0f} s", cause.output or b"")
        ) from cause
    if done.returncode != 0:
        raise UserError(
            build_failure(
                what, f"{words[0]} ended with {done.returncode}", done.stdout + done.stderr
            )
        )
    return done.stdout.decode(errors="replace")


def build_failure(what: str, how: str, output: bytes) -> Problem:
    """Describe the failure of a part of a build."""
    tail = output.decode(errors="replace")[-_TAIL_CHARACTERS:].strip()
    return Problem("BuildFailed", f"{how}\n{tail}", what, "repair what it names")
