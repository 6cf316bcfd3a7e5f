"""A registry that serves one OCI layout over HTTP, honestly or not.

Source: https://github.com/opencontainers/distribution-spec, the pull category.
"""

import base64
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from typing_extensions import override

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass
class Registry:
    """What it serves, and how."""

    layout: Path
    tags: dict[str, str] = field(default_factory=dict)
    """Digest of the manifest by tag."""
    password: str = ""
    """Asked of a user `etude` unless empty."""
    forged: dict[str, bytes] = field(default_factory=dict)
    """By digest, the content that it sends in place of the right one."""
    stalls: set[str] = field(default_factory=set)
    """Digests that it begins to send and never ends."""
    drips: set[str] = field(default_factory=set)
    """Digests that it sends slowly, for ever."""
    floods: set[str] = field(default_factory=set)
    """Digests that it sends as zeros without an end."""
    host: str = ""
    asked: list[str] = field(default_factory=list)
    """Paths of requests."""
    released: threading.Event = field(default_factory=threading.Event)


class _Handler(BaseHTTPRequestHandler):
    registry: Registry

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        registry = self.registry
        registry.asked.append(self.path)
        wanted = base64.b64encode(f"etude:{registry.password}".encode()).decode()
        if registry.password and self.headers.get("Authorization") != f"Basic {wanted}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="test"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        name = self.path.rpartition("/")[2]
        digest = registry.tags.get(name, name)
        path = registry.layout / "blobs/sha256" / digest.removeprefix("sha256:")
        if self.path != "/v2/" and not path.is_file():
            self.send_error(404)
            return
        data = b"{}" if self.path == "/v2/" else registry.forged.get(digest) or path.read_bytes()
        self.send_response(200)
        self.send_header("Docker-Content-Digest", digest)
        self.send_header("Content-Type", _MANIFEST if "/manifests/" in self.path else "bin/x")
        is_endless = digest in registry.drips | registry.floods
        if not is_endless:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if has_body and is_endless:
            self._send_without_end(registry, is_slow=digest in registry.drips)
        elif has_body and digest in registry.stalls:
            self.wfile.write(data[:1])
            self.wfile.flush()
            registry.released.wait(60)
        elif has_body:
            self.wfile.write(data)

    def _send_without_end(self, registry: Registry, *, is_slow: bool) -> None:
        size, pause_s = (5_000, 0.2) if is_slow else (1 << 20, 0.0)
        with contextlib.suppress(ConnectionError):
            while not registry.released.wait(pause_s):
                self.wfile.write(bytes(size))
                self.wfile.flush()

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def serving(registry: Registry) -> Iterator[Registry]:
    """Serve until the end of the block, at `registry.host`."""
    handler = type("Handler", (_Handler,), {"registry": registry})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        registry.host = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield registry
        finally:
            registry.released.set()
            server.shutdown()
            thread.join()
