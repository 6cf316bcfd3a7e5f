"""What a proxy may do to requests and events."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field

from tests.operator_faults.proxy import Call, Cut, Events, Forward, Reply, event_of, type_of

from etude.operator.manifests import Manifest

Matches = Callable[[Call], bool]

REASONS = {
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


def writes(call: Call) -> bool:
    """Any write that counts."""
    return call.counts


def reads(call: Call) -> bool:
    """Any list or read of an object."""
    return call.verb in {"list", "get"}


def everything(call: Call) -> bool:
    """Any request at all, the lease's too."""
    return bool(call.verb)


def refusal(code: int, *, retry_after_s: int | None = None) -> Reply:
    """A Status as the API server answers it."""
    status: Manifest = {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": REASONS[code],
        "message": f"a fault of this test: {REASONS[code]}",
    }
    headers = {"Content-Type": "application/json"}
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    return Reply(code, json.dumps(status).encode(), headers)


@dataclass(slots=True)
class Kill:
    """SIGKILL at the k-th write: after it was done, before the operator knows; or before it."""

    at: int
    is_before: bool
    pid: Callable[[], int]
    is_armed: bool = False
    seen: int = 0
    fired: str = ""
    """The write at which it did; empty until then."""

    async def __call__(self, call: Call, forward: Forward) -> Reply:
        if not self.is_armed or not call.counts:
            return await forward(call)
        self.seen += 1
        if self.fired or self.seen != self.at:
            return await forward(call)
        self.fired = str(call)
        if not self.is_before:
            await forward(call)
        os.kill(self.pid(), signal.SIGKILL)
        raise Cut("killed")


@dataclass(slots=True)
class Answer:
    """The first `times` requests that match are answered with a code."""

    code: int
    matches: Matches
    times: int = 1
    retry_after_s: int | None = None
    is_done: bool = False
    """Whether the API server has done what was asked before the answer is replaced."""
    hits: list[str] = field(default_factory=list)

    async def __call__(self, call: Call, forward: Forward) -> Reply:
        if len(self.hits) >= self.times or not self.matches(call):
            return await forward(call)
        self.hits.append(str(call))
        if self.is_done:
            await forward(call)
        return refusal(self.code, retry_after_s=self.retry_after_s)


@dataclass(slots=True)
class Lost:
    """The API server does what is asked, and the connection breaks before the answer."""

    matches: Matches
    times: int = 1
    hits: list[str] = field(default_factory=list)

    async def __call__(self, call: Call, forward: Forward) -> Reply:
        if len(self.hits) >= self.times or not self.matches(call):
            return await forward(call)
        self.hits.append(str(call))
        await forward(call)
        raise Cut("after commit")


@dataclass(slots=True)
class Silence:
    """Requests that match are taken and never answered, until the operator hangs up."""

    matches: Matches
    times: int = 1
    hits: list[str] = field(default_factory=list)

    async def __call__(self, call: Call, forward: Forward) -> Reply:
        if len(self.hits) >= self.times or not self.matches(call):
            return await forward(call)
        self.hits.append(str(call))
        await asyncio.Event().wait()
        raise Cut("never")


@dataclass(slots=True)
class Truncated:
    """An answer that ends in the middle; with `is_whole` as JSON that nothing follows."""

    matches: Matches
    times: int = 1
    is_whole: bool = False
    hits: list[str] = field(default_factory=list)

    async def __call__(self, call: Call, forward: Forward) -> Reply:
        if len(self.hits) >= self.times or not self.matches(call):
            return await forward(call)
        self.hits.append(str(call))
        reply = await forward(call)
        half = len(reply.body) // 2
        if self.is_whole:
            return reply._replace(body=reply.body[:half])
        return reply._replace(cut_at=half)


def on(resources: Collection[str]) -> Matches:
    """Watches of these resources."""
    return lambda call: call.resource in resources


@dataclass(slots=True)
class Hide:
    """ADDED and MODIFIED of some resources are kept back; at the end only the last is told."""

    resources: Collection[str]
    hidden: int = 0
    _is_over: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, call: Call, events: Events) -> Events:
        return self._kept_back(events) if call.resource in self.resources else events

    def end(self) -> None:
        """Tell the last state of everything that is hidden."""
        self._is_over.set()

    async def _kept_back(self, events: Events) -> Events:
        kept: dict[str, bytes] = {}
        is_over = False
        async for line in _until_told(events, self._is_over):
            if line is None:
                is_over = True
                for last in kept.values():
                    yield last
            elif is_over or not self._keeps(line, kept):
                yield line

    def _keeps(self, line: bytes, kept: dict[str, bytes]) -> bool:
        found = event_of(line)
        name = found["object"].get("metadata", {}).get("name", "")
        match found["type"]:
            case "ADDED" | "MODIFIED":
                self.hidden += 1
                kept[name] = line
                return True
            case "BOOKMARK":
                return True
            case _:
                kept.pop(name, None)
                return False


async def _until_told(events: Events, told: asyncio.Event) -> AsyncIterator[bytes | None]:
    """All events, and once None as soon as it is told."""
    reading = asyncio.ensure_future(anext(events, b""))
    waiting = asyncio.ensure_future(told.wait())
    is_told = False
    try:
        while True:
            wanted = {reading} if is_told else {reading, waiting}
            done, _ = await asyncio.wait(wanted, return_when=asyncio.FIRST_COMPLETED)
            if waiting in done:
                is_told = True
                yield None
            if reading in done:
                line = reading.result()
                if not line:
                    return
                yield line
                reading = asyncio.ensure_future(anext(events, b""))
    finally:
        reading.cancel()
        waiting.cancel()


async def twice(call: Call, events: Events) -> Events:
    """Every event is told two times."""
    async for line in events:
        yield line
        if type_of(line) != "BOOKMARK":
            yield line


@dataclass(slots=True)
class Late:
    """Every event takes a while, those of different resources a different one."""

    seconds: float
    factor: float = 1.0

    async def __call__(self, call: Call, events: Events) -> Events:
        extra_s = self.seconds * (1 + self.factor * (sum(call.resource.encode()) % 3))
        async for line in events:
            await asyncio.sleep(extra_s)
            yield line


@dataclass(slots=True)
class Drop:
    """Every n-th event of some resources is never told."""

    resources: Collection[str]
    every: int = 2
    is_over: bool = False
    dropped: int = 0
    _seen: int = 0

    async def __call__(self, call: Call, events: Events) -> Events:
        async for line in events:
            if call.resource in self.resources and not self.is_over and type_of(line) != "BOOKMARK":
                self._seen += 1
                if self._seen % self.every == 0:
                    self.dropped += 1
                    continue
            yield line


@dataclass(slots=True)
class CutInside:
    """The n-th event of each watch breaks off in the middle of its object."""

    at: int = 2
    times: int = 3
    cuts: int = 0

    async def __call__(self, call: Call, events: Events) -> Events:
        seen = 0
        async for line in events:
            seen += 1
            if seen == self.at and self.cuts < self.times and type_of(line) != "BOOKMARK":
                self.cuts += 1
                yield line[: len(line) // 2]
                return
            yield line


@dataclass(slots=True)
class HalfOpen:
    """From some moment on, watches of some resources stay open and say nothing."""

    resources: Collection[str]
    is_silent: bool = False
    swallowed: int = 0

    async def __call__(self, call: Call, events: Events) -> Events:
        async for line in events:
            if self.is_silent and call.resource in self.resources:
                self.swallowed += 1
                continue
            yield line


@dataclass(slots=True)
class Travel:
    """The API server as it was at a version: lists are old, and events wait for the end."""

    version: str
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    lists: int = 0

    async def __call__(self, call: Call, forward: Forward) -> Reply:
        if call.verb != "list" or self.is_over.is_set():
            return await forward(call)
        self.lists += 1
        old = {"resourceVersion": self.version, "resourceVersionMatch": "Exact"}
        return await forward(call._replace(query={**call.query, **old}))

    async def events(self, call: Call, events: Events) -> Events:
        """Held back until the end."""
        await self.is_over.wait()
        async for line in events:
            yield line


@dataclass(slots=True)
class Gone:
    """The next watches are told that their version is too old."""

    times: int = 3
    is_event: bool = False
    """As an event of a watch that began well."""
    hits: int = 0

    async def __call__(self, call: Call, forward: Forward) -> Reply:
        if call.verb != "watch" or self.hits >= self.times:
            return await forward(call)
        self.hits += 1
        answer = refusal(410)
        if not self.is_event:
            return answer
        event = {"type": "ERROR", "object": json.loads(answer.body)}
        return Reply(200, json.dumps(event).encode() + b"\n", answer.headers)
