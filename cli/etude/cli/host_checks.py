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


def _result(
    name: str, *, good: bool, detail: str, fix: str, otherwise: CheckStatus = CheckStatus.FAIL
) -> CheckResult:
    return CheckResult(
        name=name,
        verdict=CheckStatus.PASS if good else otherwise,
        detail=detail,
        fix="" if good else fix,
    )


def check_python() -> CheckResult:
    """Check that the lock supports this interpreter."""
    good = (3, 11) <= sys.version_info[:2] < (3, 14)
    version = ".".join(map(str, sys.version_info[:3]))
    return _result("python", good=good, detail=version, fix="use Python 3.11, 3.12 or 3.13")


def check_cores() -> CheckResult:
    """Check that sampling and training can run in parallel."""
    count = len(os.sched_getaffinity(0))
    fix = "the demo works on one core, about twice as slowly"
    return _result(
        "cores", good=count >= 2, detail=f"{count} usable", fix=fix, otherwise=CheckStatus.WARN
    )


def check_memory() -> CheckResult:
    """Check that the demo's processes fit into memory."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    free_gib = int(fields["MemAvailable"].split()[0]) / 2**20
    return _result(
        "memory",
        good=free_gib >= NEED_MEMORY_GIB,
        detail=f"{free_gib:.1f} GiB free, the demo uses about {NEED_MEMORY_GIB} GiB",
        fix="close other programs",
        otherwise=CheckStatus.WARN,
    )


def check_disk(folder: Path) -> CheckResult:
    """Check that the run folder's disk has room for checkpoints."""
    free_gib = shutil.disk_usage(folder).free / 2**30
    detail = f"{free_gib:.1f} GiB free in {folder}"
    fix = "give --dir a folder on a larger disk"
    return _result("disk", good=free_gib >= NEED_DISK_GIB, detail=detail, fix=fix)


def check_store(folder: Path) -> CheckResult:
    """Check that the folder store works on this file system."""
    failure = ""
    try:
        probe(open_store(f"file://{folder.resolve()}"))
    except (EtudeError, OSError) as error:
        failure = str(error)
    fix = "use a local file system, or an S3 endpoint in spec.storage"
    detail = failure or "create-only puts work"
    return _result("object store", good=not failure, detail=detail, fix=fix)


def check_packages() -> CheckResult:
    """Check that the dependencies of the roles are installed."""
    missing = [n for n in ("torch", "vllm", "ray", "kopf") if importlib.util.find_spec(n) is None]
    detail = f"missing: {', '.join(missing)}" if missing else "torch, vllm, ray, kopf"
    fix = "run `make demo`, or uv sync --locked --extra cpu"
    return _result("packages", good=not missing, detail=detail, fix=fix)


def check_engine_plugin() -> CheckResult:
    """Check that vLLM finds our weight transfer engine."""
    is_registered = any(p.name == "etude" for p in entry_points(group="vllm.general_plugins"))
    return _result(
        "engine plugin",
        good=is_registered,
        detail="registered" if is_registered else "vLLM does not see the entry point",
        fix="reinstall: uv sync --locked --extra cpu --reinstall-package etude",
    )


def check_namespaces() -> CheckResult:
    """Check that the process driver can create its namespaces."""
    flags = ["--user", "--map-root-user", "--mount", "--pid", "--net", "--fork"]
    command = [shutil.which("unshare") or "unshare", *flags, "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        fix = "install util-linux, so that this can be checked"
        return CheckResult(name="namespaces", verdict=CheckStatus.WARN, detail=str(error), fix=fix)
    good = done.returncode == 0
    detail = "user, mount, pid and network" if good else done.stderr.strip()
    fix = "sysctl -w kernel.unprivileged_userns_clone=1, or run as root"
    return _result("namespaces", good=good, detail=detail, fix=fix)


def check_loopback() -> CheckResult:
    """Check that processes can reach each other."""
    failure = ""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        failure = str(error)
    detail = failure or "127.0.0.1 answers"
    fix = "allow connections to 127.0.0.1"
    return _result("loopback", good=not failure, detail=detail, fix=fix)


def check_kubectl() -> CheckResult:
    """Check that kubectl is installed."""
    tool = shutil.which("kubectl")
    detail = tool or "not found; needed only for clusters"
    fix, warn = "install kubectl", CheckStatus.WARN
    return _result("kubectl", good=bool(tool), detail=detail, fix=fix, otherwise=warn)


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
