"""Builds the binaries of the testbed, or finds those that are built already."""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
CACHE = Path.home() / ".cache" / "etude" / "testbed"
TOOLS = HERE / "tools.txt"
MODULES = ("k8s", "coredns", "pause")
COMPONENTS = (
    *("etcd", "kubectl", "kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    *("kubelet", "kube-proxy"),
)
"""Names under which the k8s binary is linked; it acts by the name it is called by."""
STAMP = "-s -w" + "".join(
    f" -X k8s.io/{package}.{variable}={value}"
    for package, variable, value in (
        ("component-base/version", "gitVersion", "v1.36.4"),
        ("client-go/pkg/version", "gitVersion", "v1.36.4"),
        ("component-base/version", "gitMajor", "1"),
        ("component-base/version", "gitMinor", "36"),
    )
)
"""Without these the API server reports v0.0.0."""


class Step(NamedTuple):
    """One program to build."""

    name: str
    command: tuple[str, ...]
    folder: Path


def tools() -> list[str]:
    """Programs that `go install` builds, as module@version."""
    lines = TOOLS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def programs() -> list[str]:
    """Every file that a complete build holds."""
    return [*MODULES, *COMPONENTS, *(_name(tool) for tool in tools())]


def folder() -> Path:
    """Where the binaries belong: $ETUDE_TESTBED_BIN, or a folder named after what they are."""
    if given := os.environ.get("ETUDE_TESTBED_BIN"):
        return Path(given).absolute()
    digest = hashlib.sha256(STAMP.encode())
    for path in sorted((TOOLS, *HERE.glob("*/go.*"), *HERE.glob("*/*.go"))):
        digest.update(path.read_bytes())
    return CACHE / digest.hexdigest()[:16]


def missing(where: Path) -> list[str]:
    """Programs that are not there yet."""
    return [name for name in programs() if not (where / name).exists()]


def build(say: Callable[[str], None]) -> Path:
    """Build what is missing and answer where everything is.

    Raises:
        RuntimeError: there is no Go, or a build fails.
    """
    where = folder()
    where.mkdir(parents=True, exist_ok=True)
    with (where / ".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs must not build the same thing at once
        wanted = missing(where)
        for step in _steps(where):
            if step.name in wanted:
                say(f"building {step.name} (minutes when cold) …")
                _run(step)
        for name in COMPONENTS:
            link = where / name
            if not link.exists():
                link.symlink_to("k8s")
    return where


def _steps(where: Path) -> list[Step]:
    compile_ = ("go", "build", "-mod=readonly", "-trimpath", "-ldflags")
    steps = [
        Step(
            name,
            (*compile_, STAMP if name == "k8s" else "-s -w", "-o", str(where / name), "."),
            HERE / name,
        )
        for name in MODULES
    ]
    install = ("go", "install", "-trimpath", "-ldflags", "-s -w")
    steps += [Step(_name(tool), (*install, tool), where) for tool in tools()]
    return steps


def _run(step: Step) -> None:
    if shutil.which("go") is None:
        raise RuntimeError("there is no go on PATH; install Go 1.26 or newer")
    environment = dict(os.environ, CGO_ENABLED="0", GOFLAGS="", GOWORK="off")
    environment["GOBIN"] = str(step.folder)
    done = subprocess.run(
        ("nice", *step.command), cwd=step.folder, env=environment, capture_output=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{step.name}: {done.stderr.decode(errors='replace')[-2000:]}")


def _name(tool: str) -> str:
    return tool.partition("@")[0].rpartition("/")[2]


def main() -> int:
    """Build everything; with --if-possible, say why not and succeed all the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--if-possible",
        action="store_true",
        help="without Go, without root or without network: say so and exit 0",
    )
    tolerant = parser.parse_args().if_possible
    if tolerant and os.geteuid() != 0:
        sys.stdout.write("testbed: not root, cluster tests will be skipped\n")
        return 0
    try:
        where = build(lambda line: print(f"testbed: {line}", flush=True))
    except (OSError, RuntimeError) as cause:
        sys.stderr.write(f"testbed: {cause}\n")
        return 0 if tolerant else 1
    sys.stdout.write(f"testbed: binaries in {where}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
