"""A server that speaks the hub's API: model info, resolve, redirects to a content host."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote

from typing_extensions import override

COMMIT = "a" * 40


class Request(NamedTuple):
    server: str
    """hub, or content: the host that LFS files are redirected to."""
    path: str
    range: str | None
    token: str | None


class Fault(NamedTuple):
    status: int = 503
    headers: tuple[tuple[str, str], ...] = ()
    sent_bytes: int | None = None
    """Break off after so many bytes of a right answer."""


@dataclass
class Hub:
    """One repository; each fault is used up by one request whose path and range have its key."""

    repository: str
    files: dict[str, bytes]
    lfs: frozenset[str] = frozenset()
    token: str | None = None
    commit: str = COMMIT
    wrong_digests: frozenset[str] = frozenset()
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    endpoint: str = ""
    content_host: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def info(self) -> dict[str, object]:
        return {
            "id": self.repository,
            "sha": self.commit,
            "siblings": [self._sibling(name) for name in sorted(self.files)],
        }

    def _sibling(self, name: str) -> dict[str, object]:
        data = self.files[name]
        git = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        if name in self.wrong_digests:
            git = "0" * 40
        entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": git}
        if name in self.lfs:
            sha256 = hashlib.sha256(data).hexdigest()
            if name in self.wrong_digests:
                sha256 = "0" * 64
            entry["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 130}
        return entry

    def take_fault(self, path: str) -> Fault | None:
        with self.lock:
            for key, faults in self.faults.items():
                if key in path and faults:
                    return faults.pop(0)
        return None

    def ranges(self, name: str) -> list[str | None]:
        """Ranges of a file that were asked of the host that sends it."""
        server = "content" if name in self.lfs else "hub"
        return [r.range for r in self.requests if r.server == server and r.path.endswith(name)]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    server_name: str
    protocol_version = "HTTP/1.1"

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(self.path.partition("?")[0])
        authorization = self.headers.get("Authorization")
        with hub.lock:
            hub.requests.append(
                Request(self.server_name, path, self.headers.get("Range"), authorization)
            )
        fault = hub.take_fault(f"{path} {self.headers.get('Range')}")
        if fault is not None and fault.sent_bytes is None:
            self._answer(fault.status, b"", dict(fault.headers))
        elif self.server_name == "content":
            self._file(hub.files[path.rpartition("/")[2]], fault)
        elif hub.token is not None and authorization != f"Bearer {hub.token}":
            self._answer(401, b"", {"X-Error-Code": "GatedRepo"} if authorization else {})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            self._info(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[3], fault)
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _info(self, repository: str, revision: str) -> None:
        if repository != self.hub.repository:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision not in {"main", "v1/0", self.hub.commit}:
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            self._answer(200, json.dumps(self.hub.info()).encode(), {})

    def _resolve(self, name: str, fault: Fault | None) -> None:
        if name in self.hub.lfs:
            location = f"{self.hub.content_host}/signed-secret/{name}"
            self._answer(302, b"", {"Location": location})
        else:
            self._file(self.hub.files[name], fault)

    def _file(self, data: bytes, fault: Fault | None) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if match is None:
            self._answer(200, data, {}, fault)
            return
        start, end = int(match[1]), min(int(match[2]), len(data) - 1)
        header = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
        self._answer(206, data[start : end + 1], header, fault)

    def _answer(
        self, status: int, body: bytes, headers: Mapping[str, str], fault: Fault | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault is not None and fault.sent_bytes is not None:
            self.wfile.write(body[: fault.sent_bytes])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body)


@contextmanager
def serve_hub(hub: Hub) -> Iterator[Hub]:
    servers = []
    for name in ("hub", "content"):
        kind = type("Handler", (_Handler,), {"hub": hub, "server_name": name})
        server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
    hub.endpoint = f"http://127.0.0.1:{servers[0].server_port}"
    hub.content_host = f"http://localhost:{servers[1].server_port}"
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
