"""Client of a test cluster's API server, as its administrator."""

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from pydantic_core import from_json

from etude.operator.kube.rest import path_of
from etude.operator.manifests import Manifest, Ref

log = logging.getLogger(__name__)

JSON = "application/json"
MERGE = "application/merge-patch+json"
LIMIT_S = 30.0
RETRY_S = 0.3
LINE_BYTES = 1 << 22
"""Of one watch event: an object and its managed fields."""


class Reply(NamedTuple):
    """Status and body of an answer."""

    status: int
    body: Manifest

    @property
    def is_good(self) -> bool:
        return self.status < 300

    @property
    def message(self) -> str:
        """The message, with the fields of its causes."""
        causes = (self.body.get("details") or {}).get("causes") or ()
        fields = " ".join(str(cause.get("field", "")) for cause in causes)
        return f"{self.body.get('message', '')} [{fields}]"


class RefusedError(AssertionError):
    """The API server refused a request."""

    def __init__(self, what: str, reply: Reply) -> None:
        super().__init__(f"{what}: {reply.status} {reply.body.get('message')}")
        self.status = reply.status


@dataclass(slots=True)
class ApiClient:
    """One connection pool to one API server."""

    session: aiohttp.ClientSession
    address: str
    limit_s: float | None = LIMIT_S
    """Of one request."""

    async def request(
        self,
        verb: str,
        path: str,
        body: object = None,
        *,
        content: str = JSON,
        query: Mapping[str, str] | None = None,
        as_user: str = "",
    ) -> Reply:
        """Send one request; its body is JSON text or what becomes that.

        Args:
            verb: of HTTP.
            path: with or without a query.
            body: of the request.
            content: type of the body.
            query: parameters beside those of the path.
            as_user: the user to impersonate.

        Raises:
            ClientError: no answer came.
        """
        headers = {"Content-Type": content} | ({"Impersonate-User": as_user} if as_user else {})
        async with self.session.request(
            verb,
            self.address + path,
            data=body if body is None or isinstance(body, str) else json.dumps(body),
            params=query,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self.limit_s, sock_connect=10),
        ) as answer:
            return Reply(answer.status, _parse(await answer.read()))

    async def call(
        self,
        verb: str,
        path: str,
        body: object = None,
        *,
        content: str = JSON,
        query: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Send one request that must succeed.

        Raises:
            RefusedError: it was refused.
        """
        reply = await self.request(verb, path, body, content=content, query=query)
        if not reply.is_good:
            raise RefusedError(f"{verb} {path}", reply)
        return reply.body

    async def create(self, manifest: Manifest, namespace: str = "") -> Manifest:
        return await self.call("POST", path_of(manifest["kind"], namespace), manifest)

    async def merge(self, ref: Ref, body: object, subresource: str = "") -> Manifest:
        """Send a merge patch."""
        path = path_of(ref.kind, ref.namespace, ref.name, subresource)
        return await self.call("PATCH", path, body, content=MERGE)

    async def delete(self, ref: Ref, **options: Any) -> None:
        """Delete an object; one that is gone is fine.

        Raises:
            RefusedError: it may not be deleted.
        """
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        path = path_of(ref.kind, ref.namespace, ref.name)
        try:
            await self.call("DELETE", path, body)
        except RefusedError as error:
            if error.status not in {404, 409}:
                raise

    async def count(self, path: str) -> int:
        """Number of objects of a list, most of which are not read."""
        found = await self.call("GET", path, query={"limit": "1"})
        left = found["metadata"].get("remainingItemCount") or 0
        return len(found["items"]) + int(left)

    async def watch(self, path: str, **query: str) -> AsyncIterator[Manifest]:
        """Events of a watch, until the server ends it.

        Raises:
            RefusedError: there is no watch.
        """
        query = {"watch": "1", "timeoutSeconds": "3000", **query}
        async with self.session.get(
            self.address + path, params=query, timeout=aiohttp.ClientTimeout(total=None)
        ) as answer:
            if answer.status >= 300:
                reply = Reply(answer.status, _parse(await answer.read()))
                raise RefusedError(f"watch {path}", reply)
            async for line in answer.content:
                yield from_json(line)


def _parse(body: bytes) -> Manifest:
    """An answer; a server that is just starting writes plain text."""
    try:
        found: Manifest = from_json(body)
    except ValueError:
        return {"message": body.decode(errors="replace")}
    return found


async def retry_until_answered(call: Callable[[], Awaitable[object]]) -> None:
    """Repeat a call until an API server that was killed answers again.

    Raises:
        RefusedError: the call is refused.
    """
    while True:
        try:
            await call()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.info("%r", error)
        except RefusedError as error:
            if error.status < 500:
                raise
            log.info("%r", error)
        else:
            return
        await asyncio.sleep(RETRY_S)


def administrator_context(pki: Path) -> ssl.SSLContext:
    """TLS with the certificate of a test cluster's administrator."""
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
    return context


@contextlib.asynccontextmanager
async def connect_client(
    state: Mapping[str, Any], *, limit_s: float | None = LIMIT_S
) -> AsyncIterator[ApiClient]:
    """Client of the API server of a test cluster."""
    context = administrator_context(Path(state["run"]) / "pki")
    connector = aiohttp.TCPConnector(ssl=context, limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=LINE_BYTES) as session:
        yield ApiClient(session, f"https://{state['node_ip']}:6443", limit_s)
    await asyncio.sleep(0)
