"""Builds the MinIO server that tests run against, or finds the one that is built already."""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

MODULE = "github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c"
"""The last commit of the archived repository; its release tags are no module versions."""
CACHE = Path.home() / ".cache" / "etude" / "testbed"


def binary() -> Path:
    """Where the server belongs: $ETUDE_MINIO, or a folder named after what it is built from."""
    if given := os.environ.get("ETUDE_MINIO"):
        return Path(given).absolute()
    return CACHE / f"minio-{hashlib.sha256(MODULE.encode()).hexdigest()[:16]}" / "minio"


def build() -> Path:
    """Build the server if it is missing, and answer where it is.

    Raises:
        RuntimeError: there is no Go, or the build fails.
    """
    server = binary()
    server.parent.mkdir(parents=True, exist_ok=True)
    with (server.parent / ".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs must not build the same thing at once
        if server.exists():
            return server
        if shutil.which("go") is None:
            raise RuntimeError("there is no go on PATH; install Go 1.26 or newer")
        print("minio: building (minutes when cold) …", flush=True)
        environment = dict(os.environ, CGO_ENABLED="0", GOFLAGS="", GOWORK="off")
        environment["GOBIN"] = str(server.parent)
        done = subprocess.run(
            ("nice", "go", "install", "-trimpath", "-ldflags", "-s -w", MODULE),
            env=environment,
            capture_output=True,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.decode(errors="replace")[-2000:])
    return server


def main() -> int:
    """Build it; with --if-possible, say why not and succeed all the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--if-possible", action="store_true", help="without Go or network: say so and exit 0"
    )
    tolerant = parser.parse_args().if_possible
    try:
        server = build()
    except (OSError, RuntimeError) as cause:
        sys.stderr.write(f"minio: {cause}\n")
        return 0 if tolerant else 1
    sys.stdout.write(f"minio: {server}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
