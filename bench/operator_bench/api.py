"""The API server as the bench's own administrator sees it: a few verbs, many at once."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from pydantic_core import from_json

GROUP = "/apis/etude.dev/v1alpha1"
AT_ONCE = 16
"""Requests of the bench that are under way together: more would only stand in line."""

SAY_EVERY_S = 10.0
"""How long a measurement may be silent about how far it is."""

Object = dict[str, Any]
Say = Callable[[str], None]


class Api:
    """One connection pool to one API server."""

    def __init__(self, server: str, pki: Path) -> None:
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._server = server
        limits = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context), timeout=limits, read_bufsize=2**21
        )

    async def close(self) -> None:
        """Let go of the connections."""
        await self._session.close()

    async def call(
        self, verb: str, path: str, body: object = None, *, content: str = "application/json"
    ) -> Object:
        """One request.

        Raises:
            RuntimeError: it was refused; the message is what the API server said.
        """
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content}
        async with self._session.request(
            verb, self._server + path, data=data, headers=headers
        ) as answer:
            text = await answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{verb} {path}: {text[:500].decode(errors='replace')}")
        found: Object = from_json(text)
        return found

    async def patch(self, path: str, body: object) -> Object:
        """A merge patch."""
        return await self.call("PATCH", path, body, content="application/merge-patch+json")

    async def count(self, path: str, query: str = "") -> int:
        """How many objects a list has, without reading them."""
        found = await self.call("GET", f"{path}?limit=1{query}")
        left = found["metadata"].get("remainingItemCount") or 0
        return len(found["items"]) + int(left)

    async def watch(
        self, path: str, seen: Callable[[str, Object], None], *, query: str = ""
    ) -> None:
        """Tell of every object that is there and of every change, until cancelled."""
        while True:
            url = f"{self._server}{path}?watch=1&sendInitialEvents=true"
            url += f"&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true{query}"
            async with self._session.get(url) as answer:
                if answer.status != 200:  # the storage of a CRD that was just installed
                    await asyncio.sleep(0.5)
                    continue
                async for line in answer.content:
                    event = from_json(line)
                    if event["type"] not in {"BOOKMARK", "ERROR"}:
                        seen(event["type"], event["object"])


async def all_of(tasks: Iterable[Callable[[], Any]], at_once: int = AT_ONCE) -> None:
    """Run them, so many at a time."""
    waiting = iter(tasks)

    async def work() -> None:
        for task in waiting:
            await task()

    async with asyncio.TaskGroup() as group:
        for number in range(at_once):
            group.create_task(work(), name=f"caller-{number}")


async def until_none(
    left: Callable[[], int], what: str, limit_s: float, say: Say, *, every_s: float = 0.2
) -> None:
    """Wait until nothing is left to come; says now and then how much is.

    Raises:
        TimeoutError: it never came; names it.
    """
    loop = asyncio.get_running_loop()
    began_s = said_s = loop.time()
    while count := left():
        now_s = loop.time()
        if now_s - began_s > limit_s:
            raise TimeoutError(f"{what}: {count} left after {limit_s:.0f} s")
        if now_s - said_s > SAY_EVERY_S:
            say(f"{what}: {count} left")
            said_s = now_s
        await asyncio.sleep(every_s)


async def ticks(every_s: float) -> AsyncIterator[None]:
    """Now, and then at a steady pace whatever the body takes."""
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while True:
        yield
        due_s += every_s
        await asyncio.sleep(max(0.0, due_s - loop.time()))


def condition(found: Mapping[str, Any], kind: str) -> str:
    """True or False as a condition says it; empty without it."""
    for each in found.get("status", {}).get("conditions", ()):
        if each["type"] == kind:
            return str(each["status"])
    return ""
