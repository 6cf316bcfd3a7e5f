"""The API server by HTTP, with a connection for each thread."""

import http.client
import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from etude.operator.manifests import RESOURCES

TIMEOUT_S = 60
MERGE = "application/merge-patch+json"


class Reply(NamedTuple):
    """What the API server answered."""

    status: int
    body: dict[str, Any]

    @property
    def is_good(self) -> bool:
        """Whether it did what was asked."""
        return self.status < 300

    @property
    def message(self) -> str:
        """What it says, with the fields of its causes."""
        causes = (self.body.get("details") or {}).get("causes") or ()
        fields = " ".join(str(cause.get("field", "")) for cause in causes)
        return f"{self.body.get('message', '')} [{fields}]"


class Api:
    """Requests as administrator, or as somebody else with `as_user`."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        pki = Path(state["run"]) / "pki"
        self._context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._host: str = state["node_ip"]
        self._local = threading.local()

    def call(
        self,
        verb: str,
        path: str,
        text: str | None = None,
        *,
        content: str = "application/json",
        as_user: str = "",
    ) -> Reply:
        """One request; a connection that has ended is opened anew."""
        headers = {"Content-Type": content, "Accept": "application/json"}
        headers |= {"Impersonate-User": as_user} if as_user else {}
        data = None if text is None else text.encode()
        try:
            return self._once(verb, path, data, headers)
        except (OSError, http.client.HTTPException):
            self._local.connection = None
            return self._once(verb, path, data, headers)

    def _once(self, verb: str, path: str, data: bytes | None, headers: Mapping[str, str]) -> Reply:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPSConnection(
                self._host, 6443, timeout=TIMEOUT_S, context=self._context
            )
            self._local.connection = connection
        connection.request(verb, path, data, dict(headers))
        response = connection.getresponse()
        read = response.read()
        try:
            return Reply(response.status, json.loads(read))
        except ValueError:
            return Reply(response.status, {"message": read.decode(errors="replace")})

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        """One object; empty if there is none."""
        reply = self.call("GET", path_of(kind, namespace, name))
        return reply.body if reply.is_good else {}

    def listed(self, kind: str, namespace: str) -> Iterator[dict[str, Any]]:
        """Every object of a kind."""
        reply = self.call("GET", path_of(kind, namespace))
        assert reply.is_good, reply
        for item in reply.body.get("items") or ():
            yield {"apiVersion": RESOURCES[kind].api_version, "kind": kind, **item}


def path_of(kind: str, namespace: str, name: str = "", part: str = "") -> str:
    """Where a kind or an object is."""
    version, plural = RESOURCES[kind]
    root = "/apis" if "/" in version else "/api"
    parts = (root, version, "namespaces", namespace, plural, name, part)
    return "/".join(each for each in parts if each)
