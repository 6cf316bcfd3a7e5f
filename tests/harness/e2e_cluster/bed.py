"""The test bed of a pass: a node, its images and a disk, and the programs of a user."""

import json
import os
import runpy
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.kube import testbeds

ROOT = Path(__file__).parents[3]
BASE = "localhost/etude-base:1"
MINIO = "localhost/minio:1"
DISK_GIB = 10
OPERATORS_USER = 10_001
LIMIT_S = 600

State = Mapping[str, Any]


class RefusedError(AssertionError):
    """A program failed; the message is what it said."""


class Bed:
    """A running cluster, and what a user types on it."""

    def __init__(self, state: State) -> None:
        self.state = state
        folders = (state["binaries"], str(ROOT / ".venv" / "bin"), os.environ["PATH"])
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(state["kubeconfig"]),
            "PATH": os.pathsep.join(folders),
            "COLUMNS": "120",
        }

    def run(self, *words: str, text: str | None = None) -> str:
        """What a program answers.

        Raises:
            RefusedError: it failed.
        """
        done = subprocess.run(
            words,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            env=self._environment,
            timeout=LIMIT_S,
        )
        if done.returncode != 0:
            raise RefusedError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def kubectl(self, *words: str, text: str | None = None) -> str:
        """What kubectl answers."""
        return self.run("kubectl", *words, text=text)

    def get(self, *words: str) -> dict[str, Any]:
        """What kubectl finds, as objects."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found

    def follow(self, path: Path, *words: str) -> "subprocess.Popen[bytes]":
        """A program that goes on, with what it says in a file."""
        with path.open("wb") as output:
            return subprocess.Popen(
                words, stdout=output, stderr=subprocess.STDOUT, env=self._environment
            )


@contextmanager
def up(*, keep: bool = False, index: str | None = None) -> Iterator[Bed]:
    """A cluster with MinIO's image, and a disk that its claim finds.

    Args:
        keep: leave it when the pass is over.
        index: take the one that an earlier pass left.

    Raises:
        RuntimeError: there is no cluster here, or no MinIO; the message says why.
    """
    bed = _started(owner=0 if keep else os.getpid()) if index is None else _found(index)
    try:
        yield bed
    finally:
        if not keep:
            testbeds.driver("down", "--index", str(bed.state["index"]))


def _found(index: str) -> Bed:
    state = Path.home() / ".cache" / "etude" / "testbed" / f"cluster-{index}" / "cluster.json"
    return Bed(json.loads(state.read_text(encoding="utf-8")))


def _started(owner: int) -> Bed:
    minio = runpy.run_path(str(ROOT / "hack" / "minio.py"))["binary"]()
    if not minio.exists():
        raise RuntimeError("there is no MinIO: `python hack/minio.py` builds it")
    bed = Bed(json.loads(_driven("up", "--owner", str(owner))))
    index = ("--index", str(bed.state["index"]))
    try:
        _driven("image", *index, "--name", MINIO, "--program", str(minio))
        bed.kubectl("apply", "-f", "-", text=json.dumps(_disk(bed.state)))
    except BaseException:
        testbeds.driver("down", *index)
        raise
    return bed


def _driven(*words: str) -> str:
    done = testbeds.driver(*words)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return done.stdout


def _disk(state: State) -> dict[str, Any]:
    """A volume as an administrator without a provisioner would offer it."""
    folder = Path(state["run"]) / "disk"
    folder.mkdir()
    shutil.chown(folder, OPERATORS_USER, OPERATORS_USER)
    term = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1"]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "disk"},
        "spec": {
            "capacity": {"storage": f"{DISK_GIB}Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [term]}]}},
        },
    }
