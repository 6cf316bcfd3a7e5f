"""The API server as its administrator sees it, past every fault."""

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from etude.operator.kube.rest import path_of
from etude.operator.manifests import Manifest, Ref

log = logging.getLogger(__name__)

MERGE = "application/merge-patch+json"
LIMIT_S = 30.0
RETRY_S = 0.3
LINE_BYTES = 1 << 22
"""Of one watch event: an object and its managed fields."""


class RefusedError(AssertionError):
    """The API server said no."""

    def __init__(self, what: str, status: int, body: Manifest) -> None:
        super().__init__(f"{what}: {status} {body.get('message')}")
        self.status = status


@dataclass(slots=True)
class Api:
    """One connection pool."""

    session: aiohttp.ClientSession
    address: str

    async def call(
        self,
        verb: str,
        path: str,
        body: object = None,
        *,
        content: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Manifest:
        """One request.

        Raises:
            RefusedError: the answer is no.
        """
        async with self.session.request(
            verb,
            self.address + path,
            data=None if body is None else json.dumps(body),
            params=query,
            headers={"Content-Type": content},
            timeout=aiohttp.ClientTimeout(total=LIMIT_S),
        ) as answer:
            found = _parsed(await answer.read())
            if answer.status >= 300:
                raise RefusedError(f"{verb} {path}", answer.status, found)
            return found

    async def create(self, manifest: Manifest, namespace: str = "") -> Manifest:
        return await self.call("POST", path_of(manifest["kind"], namespace), manifest)

    async def merge(self, ref: Ref, body: object, subresource: str = "") -> Manifest:
        """A merge patch."""
        path = path_of(ref.kind, ref.namespace, ref.name, subresource)
        return await self.call("PATCH", path, body, content=MERGE)

    async def delete(self, ref: Ref, **options: Any) -> None:
        """Ask an object to go; one that is gone is fine.

        Raises:
            RefusedError: it may not go.
        """
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        path = path_of(ref.kind, ref.namespace, ref.name)
        try:
            await self.call("DELETE", path, body)
        except RefusedError as error:
            if error.status not in {404, 409}:
                raise

    async def watch(self, path: str, version: str) -> AsyncIterator[Manifest]:
        """Events after a version, until the server ends the watch.

        Raises:
            RefusedError: there is no watch.
        """
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "3000"}
        async with self.session.get(
            self.address + path, params=query, timeout=aiohttp.ClientTimeout(total=None)
        ) as answer:
            if answer.status >= 300:
                raise RefusedError(f"watch {path}", answer.status, _parsed(await answer.read()))
            async for line in answer.content:
                yield json.loads(line)


def _parsed(body: bytes) -> Manifest:
    """An answer; a server that is just starting writes plain text."""
    try:
        found: Manifest = json.loads(body)
    except ValueError:
        return {"message": body.decode(errors="replace")}
    return found


async def patiently(call: Callable[[], Awaitable[object]]) -> None:
    """Ask until an API server that was killed answers again.

    Raises:
        RefusedError: it answers no.
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


def tls(pki: Path) -> ssl.SSLContext:
    """As the administrator of a test cluster."""
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
    return context


@contextlib.asynccontextmanager
async def connected(state: Mapping[str, Any]) -> AsyncIterator[Api]:
    """The API server of a test cluster."""
    connector = aiohttp.TCPConnector(ssl=tls(Path(state["run"]) / "pki"), limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=LINE_BYTES) as session:
        yield Api(session, f"https://{state['node_ip']}:6443")
    await asyncio.sleep(0)
