"""The API server for threads: requests of all of them on one loop."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
from tests.support.kube.api_client import JSON, ApiClient, Reply, connect_client

from etude.operator.kube.rest import path_of
from etude.operator.manifests import RESOURCES

TIMEOUT_S = 60


class Api:
    """Requests as administrator, or as another user with `as_user`."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="API client", daemon=True).start()
        self._connection = connect_client(state, limit_s=TIMEOUT_S)
        connecting = self._connect()
        self._client = asyncio.run_coroutine_threadsafe(connecting, self._loop).result()

    async def _connect(self) -> ApiClient:
        return await self._connection.__aenter__()  # open until the process ends

    def call(
        self,
        verb: str,
        path: str,
        text: str | None = None,
        *,
        content: str = JSON,
        as_user: str = "",
    ) -> Reply:
        """Send one request, and once more after an interrupted connection."""
        try:
            return self._call_once(verb, path, text, content, as_user)
        except aiohttp.ClientConnectionError:
            return self._call_once(verb, path, text, content, as_user)

    def _call_once(
        self, verb: str, path: str, text: str | None, content: str, as_user: str
    ) -> Reply:
        asking = self._client.request(verb, path, text, content=content, as_user=as_user)
        return asyncio.run_coroutine_threadsafe(asking, self._loop).result()

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        """Get one object; empty if there is none."""
        reply = self.call("GET", path_of(kind, namespace, name))
        return reply.body if reply.is_good else {}

    def listed(self, kind: str, namespace: str) -> Iterator[dict[str, Any]]:
        """Every object of a kind."""
        reply = self.call("GET", path_of(kind, namespace))
        assert reply.is_good, reply
        for item in reply.body.get("items") or ():
            yield {"apiVersion": RESOURCES[kind].api_version, "kind": kind, **item}
