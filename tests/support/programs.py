"""Programs of others, installed from their registry, each list of packages in its own environment.

A list pins every package; an environment stays in the user's cache for the next run.
"""

import hashlib
import shutil
import subprocess
from pathlib import Path

CACHE = Path.home() / ".cache" / "etude" / "peers"
INSTALL_S = 600
ROOT = Path(__file__).parents[2]


class AbsentError(Exception):
    """A program that could not be installed or started."""


def install_programs(requirements: Path) -> Path:
    """Install a list of packages once; returns the folder of their programs.

    Raises:
        AbsentError: a package cannot be had.
    """
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    folder = CACHE / f"{requirements.stem}-{digest}"
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run_uv("venv", "--python", "3.11", str(folder))
        python = str(folder / "bin" / "python")
        _run_uv("pip", "install", "--no-deps", "--python", python, "-r", str(requirements))
        (folder / "installed").touch()
    return folder / "bin"


def _run_uv(*words: str) -> None:
    """Run uv without this project's settings, which leave some packages out.

    Raises:
        AbsentError: it failed.
    """
    program = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    try:
        done = subprocess.run(
            [program, *words, "--no-config"],
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AbsentError(str(error)) from error
    if done.returncode:
        raise AbsentError((done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1])
