"""Requests of the bench: many at a time, waits for their effects."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from tests.support.kube.api_client import ApiClient, RefusedError

GROUP = "/apis/etude.dev/v1alpha1"
AT_ONCE = 16
"""Requests of the bench that are under way together: more would only stand in line."""

SAY_EVERY_S = 10.0
"""How long a measurement may be silent about how far it is."""

Object = dict[str, Any]
Say = Callable[[str], None]


async def follow(
    api: ApiClient, path: str, seen: Callable[[str, Object], None], **query: str
) -> None:
    """Tell of every object that is there and of every change, until cancelled."""
    query |= {"sendInitialEvents": "true", "allowWatchBookmarks": "true"}
    query |= {"resourceVersionMatch": "NotOlderThan"}
    while True:
        try:
            async for event in api.watch(path, **query):
                if event["type"] not in {"BOOKMARK", "ERROR"}:
                    seen(event["type"], event["object"])
        except RefusedError:  # the storage of a CRD that was just installed
            await asyncio.sleep(0.5)


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
