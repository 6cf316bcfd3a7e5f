"""Builds the agent that runs inside of sandboxes, or finds the one that is built already."""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "services" / "envserver" / "guest"
CACHE = Path.home() / ".cache" / "etude" / "guest"
_DEBUG = "-X=runtime.godebugDefault=asyncpreemptoff=1"
"""Nothing in it runs for long without a call of a function, and the first signal that a thread of a
clone gets costs it 2 ms."""
_BUILD = ("go", "build", "-trimpath", f"-ldflags=-s -w -buildid= {_DEBUG}")
"""The same sources and the same Go give the same bytes."""
_ENVIRONMENT = {
    "CGO_ENABLED": "0",
    "GOOS": "linux",
    "GOARCH": "amd64",
    "GOFLAGS": "",
    "GOWORK": "off",
}
_MISSING = "there is no go on PATH; install Go 1.24 or newer"


def digest() -> str:
    """What the program is made of: every source file that is part of it."""
    hasher = hashlib.sha256(repr((_BUILD, sorted(_ENVIRONMENT.items()))).encode())
    files = (SOURCES / "go.mod", *SOURCES.glob("*.go"))
    for path in sorted(f for f in files if not f.name.endswith("_test.go")):
        hasher.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:16]


def binary() -> Path:
    """Where the program belongs: $ETUDE_GUEST, or a folder named after its sources."""
    if given := os.environ.get("ETUDE_GUEST"):
        return Path(given).absolute()
    return CACHE / digest() / "guestagent"


def build() -> Path:
    """Build the program if it is missing, and answer where it is.

    Raises:
        RuntimeError: there is no Go, or the build fails.
    """
    program = binary()
    if program.exists():
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    with (program.parent / ".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs must not build the same thing at once
        if program.exists():
            return program
        if shutil.which("go") is None:
            raise RuntimeError(_MISSING)
        partial = program.with_suffix(".partial")
        done = subprocess.run(
            (*_BUILD, "-o", str(partial), "."),
            cwd=SOURCES,
            env={**os.environ, **_ENVIRONMENT},
            capture_output=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr.decode(errors="replace")[-2000:])
        partial.rename(program)
    return program


def main() -> int:
    """Build it; with --if-possible, say why not and succeed all the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--if-possible", action="store_true", help="without Go: say so and exit 0")
    tolerant = parser.parse_args().if_possible
    try:
        program = build()
    except (OSError, RuntimeError) as cause:
        sys.stderr.write(f"guest: {cause}\n")
        return 0 if tolerant else 1
    sys.stdout.write(f"guest: {program}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
