"""A proxy between one operator and its API server, which notes everything and misbehaves to order.

The operator speaks plain HTTP to it, it speaks TLS to the API server, as the administrator. A
fault is a function around a request or around the events of a watch; the first one that was given
is the outermost.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from tests.support.kube.api_client import ApiClient
from typing_extensions import override

PASSED_ON = ("Content-Type", "Accept")
ANSWERED = ("Content-Type", "Retry-After")
UPSTREAM_LIMIT_S = 60.0
WATCH_TYPES = {"ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"}
UNCOUNTED = {"leases", "events"}


class Call(NamedTuple):
    """One request, in the words of the API."""

    verb: str
    """get, list, watch, create, apply, patch, update, delete."""
    resource: str
    namespace: str
    name: str
    subresource: str
    path: str
    query: Mapping[str, str]
    body: bytes

    @property
    def counts(self) -> bool:
        """Whether this is a write that a crash plan counts."""
        is_write = self.verb not in {"get", "list", "watch"}
        return is_write and self.resource not in UNCOUNTED

    @override
    def __str__(self) -> str:
        parts = (self.resource, self.name, self.subresource)
        return f"{self.verb} {'/'.join(part for part in parts if part)}"


class Reply(NamedTuple):
    """One answer, complete unless it is cut."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}
    cut_at: int | None = None
    """The connection is closed after so many bytes of the body."""


class Entry(NamedTuple):
    """What the log says of a request or an event."""

    at_s: float
    """Monotonic."""
    call: Call
    outcome: int | str
    """Status of the answer, type of the event, or what became of it instead."""


class Cut(Exception):  # noqa: N818 - not an error of ours
    """The connection ends without an answer."""


Forward = Callable[[Call], Awaitable[Reply]]
Fault = Callable[[Call, Forward], Awaitable[Reply]]
Events = AsyncIterator[bytes]
EventFault = Callable[[Call, Events], Events]


@dataclass(slots=True)
class Proxy:
    """One operator's way to the API server."""

    api: ApiClient
    faults: list[Fault] = field(default_factory=list)
    event_faults: list[EventFault] = field(default_factory=list)
    log: list[Entry] = field(default_factory=list)
    address: str = ""
    _streams: set["asyncio.Task[Any] | None"] = field(default_factory=set)

    @property
    def writes(self) -> list[Call]:
        """Every counted write that was asked for."""
        return [entry.call for entry in self.log if entry.call.counts]

    def note(self, call: Call, outcome: int | str) -> None:
        """Add a line to the log."""
        self.log.append(Entry(time.monotonic(), call, outcome))

    def break_streams(self) -> None:
        """Cut every watch that is open now."""
        for task in list(self._streams):
            if task is not None:
                task.cancel()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request of the operator."""
        call = call_of(
            request.method,
            request.path,
            dict(request.query),
            await request.read(),
            request.headers.get("Content-Type", ""),
        )
        try:
            if call.verb == "watch":
                return await self._watch(request, call)
            return await self._answer(request, call)
        except Cut as cut:
            self.note(call, f"cut: {cut}")
            return _abort(request)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.note(call, repr(error))
            return _abort(request)

    async def _answer(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        headers = _headers(request)

        async def forward(asked: Call) -> Reply:
            limit = aiohttp.ClientTimeout(total=UPSTREAM_LIMIT_S)
            async with self.api.session.request(
                request.method,
                self.api.address + asked.path,
                params=asked.query,
                data=asked.body or None,
                headers=headers,
                timeout=limit,
            ) as answer:
                kept = {k: v for k, v in answer.headers.items() if k in ANSWERED}
                return Reply(answer.status, await answer.read(), kept)

        reply = await self._through(forward)(call)
        self.note(call, reply.status)
        length = str(len(reply.body))
        given = CIMultiDict({**reply.headers, "Content-Length": length})
        response = web.StreamResponse(status=reply.status, headers=given)
        await response.prepare(request)
        await response.write(reply.body[: reply.cut_at])
        if reply.cut_at is not None:
            return _abort(request)
        await response.write_eof()
        return response

    def _through(self, forward: Forward) -> Forward:
        for fault in reversed(self.faults):
            forward = _around(fault, forward)
        return forward

    async def _watch(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        self._streams.add(asyncio.current_task())
        opened: list[aiohttp.ClientResponse] = []

        async def forward(asked: Call) -> Reply:
            """The head of the answer; its events follow."""
            answer = await self.api.session.get(
                self.api.address + asked.path,
                params=asked.query,
                headers=_headers(request),
                timeout=aiohttp.ClientTimeout(total=None),
            )
            opened.append(answer)
            return Reply(answer.status, b"", {"Content-Type": "application/json"})

        try:
            reply = await self._through(forward)(call)
            self.note(call, reply.status)
            response = web.StreamResponse(status=reply.status, headers=dict(reply.headers))
            await response.prepare(request)
            events = self._lines(opened[0]) if opened else _once(reply.body)
            for fault in self.event_faults:
                events = fault(call, events)
            async for line in events:
                self.note(call, type_of(line))
                await response.write(line)
            await response.write_eof()
        except asyncio.CancelledError:
            return _abort(request)
        finally:
            self._streams.discard(asyncio.current_task())
            for answer in opened:
                answer.close()
        return response

    async def _lines(self, answer: aiohttp.ClientResponse) -> Events:
        async for line in answer.content:
            yield line


def _around(fault: Fault, forward: Forward) -> Forward:
    async def wrapped(call: Call) -> Reply:
        return await fault(call, forward)

    return wrapped


async def _once(body: bytes) -> Events:
    if body:
        yield body


def _abort(request: web.BaseRequest) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


def _headers(request: web.BaseRequest) -> dict[str, str]:
    return {name: request.headers[name] for name in PASSED_ON if name in request.headers}


def call_of(method: str, path: str, query: Mapping[str, str], body: bytes, content: str) -> Call:
    """What a request asks for."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    resource, name, subresource = (*rest, "", "", "")[:3]
    is_watch = query.get("watch") in {"1", "true"}
    verbs = {
        "GET": "watch" if is_watch else ("get" if name else "list"),
        "POST": "create",
        "PUT": "update",
        "DELETE": "delete",
        "PATCH": "apply" if "apply-patch" in content else "patch",
    }
    return Call(verbs[method], resource, namespace, name, subresource, path, query, body)


def event_of(line: bytes) -> dict[str, Any]:
    """One event of a watch."""
    found: dict[str, Any] = json.loads(line)
    return found


def type_of(line: bytes) -> str:
    """What kind of event a line is; of a watch that was refused it is none."""
    try:
        return str(event_of(line).get("type", "none"))
    except ValueError:
        return "broken"


@contextlib.asynccontextmanager
async def proxied(api: ApiClient) -> AsyncIterator[Proxy]:
    """A proxy that listens until the end of the block."""
    proxy = Proxy(api)
    server = web.Server(proxy.handle)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    proxy.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield proxy
    finally:
        proxy.break_streams()
        await runner.cleanup()
