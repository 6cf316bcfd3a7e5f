"""An API server as a controller sees it, and the loop that every stand-in is."""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

Manifest = dict[str, Any]
Step = Callable[["Client"], Awaitable[None]]

PAUSE_S = 0.2
MERGE = "application/merge-patch+json"


class Client:
    """Requests with the administrator's certificate."""

    def __init__(self, session: aiohttp.ClientSession, base: str, context: ssl.SSLContext) -> None:
        self._session, self._base, self._context = session, base, context

    async def every(self, path: str) -> list[Manifest]:
        """All objects under a path; none where the kind is not served."""
        status, body = await self._call("GET", path)
        items: list[Manifest] = body.get("items") or [] if status == 200 else []
        return items

    async def get(self, path: str) -> Manifest | None:
        status, body = await self._call("GET", path)
        found: Manifest | None = body if status == 200 else None
        return found

    async def create(self, path: str, body: Manifest) -> None:
        """Make an object.

        Raises:
            ValueError: the API server refuses it, which is a fault of the test.
        """
        status, reply = await self._call("POST", path, body)
        is_closing = "because it is being terminated" in str(reply.get("message"))
        if status not in {200, 201, 409} and not is_closing:
            raise ValueError(f"{path}: {reply.get('message')}")

    async def patch(self, path: str, body: Manifest) -> None:
        """Merge into an object; one that has changed or gone is looked at again in a moment.

        Raises:
            ValueError: the API server refuses it.
        """
        status, reply = await self._call("PATCH", path, body)
        if status not in {200, 404, 409}:
            raise ValueError(f"{path}: {reply.get('message')}")

    async def _call(self, verb: str, path: str, body: Manifest | None = None) -> tuple[int, Any]:
        headers = {"Content-Type": MERGE if verb == "PATCH" else "application/json"}
        async with self._session.request(
            verb, self._base + path, json=body, headers=headers, ssl=self._context
        ) as reply:
            # What is not served is answered in plain words.
            is_json = reply.content_type == "application/json"
            return reply.status, await reply.json() if is_json else {}


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
    pki = Path(cluster["run"]) / "pki"
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
    async with aiohttp.ClientSession() as session:
        client = Client(session, f"https://{cluster['node_ip']}:6443", context)
        while not stop.is_set():
            for step in steps:
                try:
                    await step(client)
                except (ValueError, KeyError, aiohttp.ClientError) as fault:
                    faults.append(fault)
                    return
            await asyncio.sleep(PAUSE_S)
