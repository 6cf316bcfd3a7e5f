"""Builds the servers of queues that tests of relays run against: NATS, from its Go module."""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

NATS = "github.com/nats-io/nats-server/v2@v2.15.2"
CACHE = Path.home() / ".cache" / "etude" / "testbed"


def nats_server() -> Path:
    """Where the server belongs: $ETUDE_NATS_SERVER, or a folder named after its module."""
    if given := os.environ.get("ETUDE_NATS_SERVER"):
        return Path(given).absolute()
    return CACHE / f"nats-{hashlib.sha256(NATS.encode()).hexdigest()[:16]}" / "nats-server"


def build() -> Path:
    """Build what is missing, and answer where it is.

    Raises:
        RuntimeError: there is no Go, or the build fails.
    """
    server = nats_server()
    server.parent.mkdir(parents=True, exist_ok=True)
    with (server.parent / ".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs must not build the same thing at once
        if server.exists():
            return server
        if shutil.which("go") is None:
            raise RuntimeError("there is no go on PATH; install Go 1.26 or newer")
        print("nats-server: building (a minute when cold) …", flush=True)
        environment = dict(os.environ, CGO_ENABLED="0", GOFLAGS="", GOWORK="off")
        environment["GOBIN"] = str(server.parent)
        done = subprocess.run(
            ("nice", "go", "install", "-trimpath", "-ldflags", "-s -w", NATS),
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
        sys.stderr.write(f"nats-server: {cause}\n")
        return 0 if tolerant else 1
    sys.stdout.write(f"nats-server: {server}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
