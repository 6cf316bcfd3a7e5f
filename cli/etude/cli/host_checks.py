"""The checks of `etude doctor`: each answers pass, warn or fail, with a fix."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path

from etude.common.blobs import open_store, probe
from etude.common.errors import EtudeError

NEED_MEMORY_GIB = 6
"""Measured peak of the demo's processes together, rounded up."""
NEED_DISK_GIB = 2


class CheckStatus(StrEnum):
    """Status of one check."""

    PASS = "pass"  # noqa: S105 - a verdict, no password
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    verdict: CheckStatus
    detail: str
    fix: str = ""


def check_python() -> CheckResult:
    """Check that the lock supports this interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] < (3, 14)
    return CheckResult(
        name="python",
        verdict=CheckStatus.PASS if good else CheckStatus.FAIL,
        detail=version,
        fix="" if good else "use Python 3.11, 3.12 or 3.13",
    )


def check_cores() -> CheckResult:
    """Check that sampling and training can run in parallel."""
    count = len(os.sched_getaffinity(0))
    return CheckResult(
        name="cores",
        verdict=CheckStatus.PASS if count >= 2 else CheckStatus.WARN,
        detail=f"{count} usable",
        fix="" if count >= 2 else "the demo works on one core, about twice as slowly",
    )


def check_memory() -> CheckResult:
    """Check that the demo's processes fit into memory."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    free_gib = int(fields["MemAvailable"].split()[0]) / 2**20
    good = free_gib >= NEED_MEMORY_GIB
    return CheckResult(
        name="memory",
        verdict=CheckStatus.PASS if good else CheckStatus.WARN,
        detail=f"{free_gib:.1f} GiB free, the demo uses about {NEED_MEMORY_GIB} GiB",
        fix="" if good else "close other programs",
    )


def check_disk(folder: Path) -> CheckResult:
    """Check that the run folder's disk has room for checkpoints."""
    free_gib = shutil.disk_usage(folder).free / 2**30
    good = free_gib >= NEED_DISK_GIB
    return CheckResult(
        name="disk",
        verdict=CheckStatus.PASS if good else CheckStatus.FAIL,
        detail=f"{free_gib:.1f} GiB free in {folder}",
        fix="" if good else "give --dir a folder on a larger disk",
    )


def check_store(folder: Path) -> CheckResult:
    """Check that the folder store works on this file system."""
    try:
        probe(open_store(f"file://{folder.resolve()}"))
    except (EtudeError, OSError) as error:
        return CheckResult(
            name="object store",
            verdict=CheckStatus.FAIL,
            detail=str(error),
            fix="use a local file system, or an S3 endpoint in spec.storage",
        )
    return CheckResult(
        name="object store", verdict=CheckStatus.PASS, detail="create-only puts work"
    )


def check_packages() -> CheckResult:
    """Check that the dependencies of the roles are installed."""
    missing = [n for n in ("torch", "vllm", "ray", "kopf") if importlib.util.find_spec(n) is None]
    return CheckResult(
        name="packages",
        verdict=CheckStatus.FAIL if missing else CheckStatus.PASS,
        detail=f"missing: {', '.join(missing)}" if missing else "torch, vllm, ray, kopf",
        fix="run `make demo`, or uv sync --locked --extra cpu" if missing else "",
    )


def check_engine_plugin() -> CheckResult:
    """Check that vLLM finds our weight transfer engine."""
    found = any(p.name == "etude" for p in entry_points(group="vllm.general_plugins"))
    return CheckResult(
        name="engine plugin",
        verdict=CheckStatus.PASS if found else CheckStatus.FAIL,
        detail="registered" if found else "vLLM does not see the entry point",
        fix="" if found else "reinstall: uv sync --locked --extra cpu --reinstall-package etude",
    )


def check_namespaces() -> CheckResult:
    """Check that the process driver can create its namespaces."""
    flags = ["--user", "--map-root-user", "--mount", "--pid", "--net", "--fork"]
    tool = shutil.which("unshare")
    command = [tool or "unshare", *flags, "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return CheckResult(
            name="namespaces",
            verdict=CheckStatus.WARN,
            detail=str(error),
            fix="install util-linux, so that this can be checked",
        )
    good = done.returncode == 0
    return CheckResult(
        name="namespaces",
        verdict=CheckStatus.PASS if good else CheckStatus.FAIL,
        detail="user, mount, pid and network" if good else done.stderr.strip(),
        fix="" if good else "sysctl -w kernel.unprivileged_userns_clone=1, or run as root",
    )


def check_loopback() -> CheckResult:
    """Check that processes can reach each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            socket.create_connection(address, timeout=2).close()
    except OSError as error:
        return CheckResult(
            name="loopback",
            verdict=CheckStatus.FAIL,
            detail=str(error),
            fix="allow connections to 127.0.0.1",
        )
    return CheckResult(name="loopback", verdict=CheckStatus.PASS, detail="127.0.0.1 answers")


def check_kubectl() -> CheckResult:
    """Check that kubectl is installed."""
    tool = shutil.which("kubectl")
    return CheckResult(
        name="kubectl",
        verdict=CheckStatus.PASS if tool else CheckStatus.WARN,
        detail=tool or "not found; needed only for clusters",
        fix="" if tool else "install kubectl",
    )


def all_checks(folder: Path) -> list[Callable[[], CheckResult]]:
    """The checks in the order they are printed."""
    return [
        check_python,
        check_cores,
        check_memory,
        lambda: check_disk(folder),
        lambda: check_store(folder),
        check_packages,
        check_engine_plugin,
        check_namespaces,
        check_loopback,
        check_kubectl,
    ]
