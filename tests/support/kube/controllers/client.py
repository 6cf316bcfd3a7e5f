"""An API server as a controller sees it, and the loop that every stand-in is."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from tests.support.kube.api_client import MERGE, ApiClient, connect_client

Manifest = dict[str, Any]
Step = Callable[["Client"], Awaitable[None]]

PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Client:
    """Requests of a stand-in, which tolerate objects that have changed or gone."""

    api: ApiClient

    async def every(self, path: str) -> list[Manifest]:
        """All objects under a path; none where the kind is not served."""
        reply = await self.api.request("GET", path)
        items: list[Manifest] = reply.body.get("items") or [] if reply.is_good else []
        return items

    async def get(self, path: str) -> Manifest | None:
        reply = await self.api.request("GET", path)
        return reply.body if reply.is_good else None

    async def create(self, path: str, body: Manifest) -> None:
        """Make an object.

        Raises:
            ValueError: the API server refuses it, which is a fault of the test.
        """
        reply = await self.api.request("POST", path, body)
        is_closing = "because it is being terminated" in str(reply.body.get("message"))
        if reply.status not in {200, 201, 409} and not is_closing:
            raise ValueError(f"{path}: {reply.body.get('message')}")

    async def patch(self, path: str, body: Manifest) -> None:
        """Merge into an object; one that has changed or gone is looked at again in a moment.

        Raises:
            ValueError: the API server refuses it.
        """
        reply = await self.api.request("PATCH", path, body, content=MERGE)
        if reply.status not in {200, 404, 409}:
            raise ValueError(f"{path}: {reply.body.get('message')}")


@contextlib.contextmanager
def controllers(cluster: Mapping[str, Any], *steps: Step) -> Iterator[list[BaseException]]:
    """Run stand-ins beside the test, each step again and again; yields what went wrong in them."""
    stop, faults = threading.Event(), list[BaseException]()

    def work() -> None:
        asyncio.run(_loop(cluster, steps, stop, faults))

    thread = threading.Thread(target=work, name="controllers")
    thread.start()
    try:
        yield faults
    finally:
        stop.set()
        thread.join(timeout=60)
    assert faults == []


async def _loop(
    cluster: Mapping[str, Any],
    steps: tuple[Step, ...],
    stop: threading.Event,
    faults: list[BaseException],
) -> None:
    async with connect_client(cluster) as api:
        client = Client(api)
        while not stop.is_set():
            for step in steps:
                try:
                    await step(client)
                except (ValueError, KeyError, aiohttp.ClientError) as fault:
                    faults.append(fault)
                    return
            await asyncio.sleep(PAUSE_S)
