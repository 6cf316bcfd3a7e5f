"""What became of the objects of one namespace, in the order in which the API server wrote it."""

import contextlib
import http.client
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Manifest = dict[str, Any]
SILENT_S = 10.0
"""A watch that says nothing for so long is begun anew, from where it was."""


class Version(NamedTuple):
    """One version of one object."""

    number: int
    """Of the whole cluster: the versions of all kinds are one sequence."""
    manifest: Manifest


class History:
    """Versions of some kinds, as they are read from the API server."""

    def __init__(self, cluster: Mapping[str, Any], namespace: str) -> None:
        pki = Path(cluster["run"]) / "pki"
        self._context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._host, self._namespace = str(cluster["node_ip"]), namespace
        self._seen: dict[str, list[Version]] = {}
        self._ends = threading.Event()

    def first(self, path: str, holds: Callable[[Manifest], object]) -> int:
        """The number of the first version of a kind, named by its API path, of which this holds.

        Raises:
            AssertionError: there is none.
        """
        found = [each.number for each in self._seen[path] if holds(each.manifest)]
        assert found, f"of {len(self._seen[path])} versions of {path} none is like that"
        return min(found)

    def follow(self, path: str, began: threading.Event) -> None:
        """Read one kind until the end, without a gap."""
        seen = self._seen.setdefault(path, [])
        version = ""
        while not self._ends.is_set():
            # What is asked for from version 0 begins with what is there.
            for event in self._events(f"{path}?watch=1&resourceVersion={version or 0}", began):
                if event["type"] == "ERROR":
                    version = ""
                    break
                version = event["object"]["metadata"]["resourceVersion"]
                seen.append(Version(int(version), event["object"]))

    def _events(self, query: str, began: threading.Event) -> Iterator[Manifest]:
        """The events of one watch, until it breaks off or nothing comes for a while."""
        api, kind = query.rsplit("/", 1)
        path = f"{api}/namespaces/{self._namespace}/{kind}"
        connection = http.client.HTTPSConnection(
            self._host, 6443, timeout=SILENT_S, context=self._context
        )
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            response = connection.getresponse()
            began.set()
            while not self._ends.is_set() and (line := response.readline()):
                yield json.loads(line)
        connection.close()

    def end(self) -> None:
        """Read nothing more."""
        self._ends.set()


@contextlib.contextmanager
def history(cluster: Mapping[str, Any], namespace: str, *paths: str) -> Iterator[History]:
    """Follow kinds of a namespace, each named by its API path, such as /api/v1/pods."""
    found = History(cluster, namespace)
    began = [threading.Event() for _ in paths]
    threads = [
        threading.Thread(target=found.follow, args=each) for each in zip(paths, began, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        assert all(each.wait(60) for each in began)
        yield found
    finally:
        found.end()
        for thread in threads:
            thread.join(timeout=60)
