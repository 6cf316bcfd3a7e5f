"""What the API server told while a pass went on: which change came before which."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness.e2e_cluster.bed import Bed


class Change(NamedTuple):
    """One event of a watch."""

    kind: str
    """ADDED, MODIFIED or DELETED."""
    body: dict[str, Any]

    @property
    def order(self) -> int:
        """Place among all changes of the cluster: one etcd counts those of all kinds together."""
        return int(self.body["metadata"]["resourceVersion"])


class History:
    """Every change of one kind in a namespace, from now on."""

    def __init__(self, bed: Bed, path: Path, namespace: str, kind: str) -> None:
        self._path = path
        words = ("get", kind, "--watch", "--output-watch-events", "-o", "json")
        self._process: subprocess.Popen[bytes] = bed.follow(
            path, "kubectl", "-n", namespace, *words
        )

    def changes(self) -> list[Change]:
        """All so far, in order."""
        return sorted(_parsed(self._path.read_text(encoding="utf-8")), key=lambda c: c.order)

    def end(self) -> None:
        """Stop watching."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=30)


def _parsed(text: str) -> Iterator[Change]:
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            event, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return  # the last one is being written
        yield Change(event["type"], event["object"])
        while at < len(text) and text[at].isspace():
            at += 1
