"""HTTP requests to the API server: paths, rate limit, timeouts."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from pydantic_core import from_json, to_json
from yarl import URL

from etude.common.errors import Problem, UserError
from etude.common.token_bucket import TokenBucket
from etude.operator import metrics, tracing
from etude.operator.clock import ServerClock
from etude.operator.kube.interface import (
    ApiRejectedError,
    ClusterError,
    ConflictError,
    NamespaceClosingError,
)
from etude.operator.manifests import RESOURCES, Manifest, Ref

_PERMANENT = {400, 403, 404, 405, 413, 415, 422}
_SCHEMA_ERRORS = ("failed to convert new object", "failed to create typed patch object")
"""Messages with which server-side apply, as an internal error, rejects a manifest that does not fit
its schema: a bad quantity, text for a number, an unknown field."""


class ApiReply(NamedTuple):
    """Status and body of an answer."""

    status: int
    body: dict[str, Any]


def parse_write_reply(reply: ApiReply, what: str) -> Manifest:
    """The object in the answer to a write.

    Raises:
        ConflictError: it has changed since it was read.
        NamespaceClosingError: its namespace is terminating.
        ApiRejectedError: it is not valid.
        ClusterError: a retry may succeed.
    """
    if reply.status < 300:
        return reply.body
    message = f"{what}: {reply.body.get('message', reply.status)}"
    causes = (reply.body.get("details") or {}).get("causes") or ()
    if any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
        raise NamespaceClosingError(message)
    if reply.status == 409:
        raise ConflictError(message)
    if reply.status in _PERMANENT or _is_schema_error(reply):
        raise ApiRejectedError(message)
    raise ClusterError(message)


def _is_schema_error(reply: ApiReply) -> bool:
    message = str(reply.body.get("message"))
    return reply.status == 500 and any(words in message for words in _SCHEMA_ERRORS)


def parse_read_reply(reply: ApiReply, what: str) -> Manifest:
    """The object in the answer to a read, a list or a renewal.

    Every error may be retried: an API server that starts forbids everything until it has read its
    roles.

    Raises:
        ClusterError: any error.
    """
    try:
        return parse_write_reply(reply, what)
    except ApiRejectedError as rejection:
        raise ClusterError(str(rejection)) from rejection


WRITE_TIMEOUT_S = 3.0
"""Shorter than the rest of a leader lease when the write gate closes."""
READ_TIMEOUT_S = 30.0
WATCH_SERVER_S = 300
WATCH_SILENCE_S = 330.0
"""Longest silence of a watch, which the server ends before."""

RATE_PER_S = 500.0
"""Default requests per second; bursts are twice as large."""
MAX_PAUSE_S = 10.0

JSON = "application/json"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

NO_LIMITS = aiohttp.ClientTimeout(total=None)
MAX_EVENT_BYTES = 2**21
"""Bytes of the longest line of a watch: an object is 1.5 MiB at most."""

Query = Sequence[tuple[str, str]]


class GoneError(ClusterError):
    """The version to watch from is too old: list again."""


@dataclass(slots=True)
class RequestBudget:
    """Rate limit of requests: the operator alone must not saturate an API server."""

    rate_per_s: float = RATE_PER_S
    tokens: TokenBucket = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = TokenBucket.full(self.rate_per_s, 2 * self.rate_per_s, at_s=time.monotonic())

    def pause(self, seconds: float) -> None:
        """Stop requests for a while, as the API server asked."""
        debt = min(seconds, MAX_PAUSE_S) * self.rate_per_s
        self.tokens = self.tokens.take(max(0.0, self.tokens.tokens + debt))

    async def take(self) -> None:
        self.tokens = self.tokens.refill(time.monotonic()).take()
        wait_s = self.tokens.wait_s(0.0)
        if wait_s:
            metrics.API_WAITED.inc(wait_s)
            await asyncio.sleep(wait_s)


@dataclass(slots=True)
class RestClient:
    """One connection pool to one API server.

    Address and credentials come from the client library. Requests are sent without it, because it
    copies every body twice.
    """

    client: ApiClient
    session: aiohttp.ClientSession
    budget: RequestBudget
    clock: ServerClock = field(default_factory=ServerClock)
    """Set from the first answer."""

    @classmethod
    async def connect(
        cls, kubeconfig: Path | None, *, rate_per_s: float = RATE_PER_S
    ) -> "RestClient":
        """Connect to the API server of a kubeconfig, or to that of this pod.

        Raises:
            UserError: the file does not exist or names no API server.
        """
        settings = Configuration()
        try:
            if kubeconfig is None:
                config.load_incluster_config(client_configuration=settings)
            else:
                await config.load_kube_config(
                    config_file=str(kubeconfig), client_configuration=settings
                )
        except config.ConfigException as cause:
            raise UserError(
                Problem(
                    reason="InvalidSetting",
                    what=f"no API server can be found: {cause}",
                    where=str(kubeconfig or "this pod's service account"),
                    fix="set KUBECONFIG to a file that kubectl can use",
                )
            ) from cause
        client = ApiClient(configuration=settings)
        connector = aiohttp.TCPConnector(ssl=client.rest_client.ssl_context, limit=0)
        # Not trust_env, which reads a file in another thread before every request.
        settings.proxy = settings.proxy or _proxy_of(settings.host)
        # Uncompressed: an API server compresses every long list if the client accepts it, and
        # its processor time is scarcer than the bandwidth inside a cluster.
        plain = {"Accept-Encoding": "identity"}
        session = aiohttp.ClientSession(
            connector=connector, read_bufsize=MAX_EVENT_BYTES, headers=plain
        )
        return cls(client, session, RequestBudget(rate_per_s))

    async def close(self) -> None:
        await self.session.close()
        await self.client.close()

    async def request(
        self,
        verb: str,
        path: str,
        *,
        query: Query = (),
        body: object = None,
        headers: Mapping[str, str] | None = None,
        is_urgent: bool = False,
    ) -> ApiReply:
        """Send a request and return its answer of any status; an urgent one skips the rate limit.

        Raises:
            ClusterError: there was no answer.
        """
        if not is_urgent:
            await self.budget.take()
        timeout_s = READ_TIMEOUT_S if verb == "GET" else WRITE_TIMEOUT_S
        began = time.monotonic()
        resource = resource_of(path)
        with tracing.trace_request(verb, resource) as set_status:
            try:
                async with (
                    # Not aiohttp's timeout, which swallows a cancellation that coincides with it:
                    # a cancelled worker would continue.
                    asyncio.timeout(timeout_s),
                    await self._send(verb, path, query, body, headers, NO_LIMITS) as answer,
                ):
                    data = await answer.read()
            except (TimeoutError, OSError, aiohttp.ClientError) as cause:
                metrics.API_REQUESTS.labels(verb, resource, "none").inc()
                raise ClusterError(f"{verb} {path}: {cause!r}") from cause
            set_status(answer.status)
        self.clock.set_from_header(answer.headers.get("Date"))
        if answer.status in {429, 503}:
            after = answer.headers.get("Retry-After", "1")
            self.budget.pause(float(after) if after.isdecimal() else 1.0)
        metrics.API_SECONDS.labels(verb).observe(time.monotonic() - began)
        metrics.API_REQUESTS.labels(verb, resource, str(answer.status)).inc()
        return ApiReply(answer.status, _parse_json(data))

    async def watch(self, path: str, query: Query) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of one watch until the server ends it.

        Raises:
            GoneError: the version is too old.
            ClusterError: the connection broke or timed out.
        """
        await self.budget.take()
        everything = [*query, ("watch", "1"), ("timeoutSeconds", str(WATCH_SERVER_S))]
        limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_SILENCE_S)
        try:
            async with await self._send("GET", path, everything, None, {}, limits) as answer:
                if answer.status == 410:
                    raise GoneError(path)
                if answer.status != 200:
                    raise ClusterError(f"watch {path}: {answer.status}")
                async for line in answer.content:
                    yield _parse_event(path, line)
        except (TimeoutError, OSError, aiohttp.ClientError) as cause:
            raise ClusterError(f"watch {path}: {cause!r}") from cause

    async def _send(
        self,
        verb: str,
        path: str,
        query: Query,
        body: object,
        headers: Mapping[str, str] | None,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        settings = self.client.configuration
        sent = {"Accept": JSON, "Content-Type": JSON, **(headers or {})}
        # Read for each request: the token of a pod's account changes every hour.
        await self.client.update_params_for_auth(sent, None, ["BearerToken"], path, verb, None)
        ending = f"?{urlencode(query)}" if query else ""
        return await self.session.request(
            verb,
            # Encoded here: the session would decode and encode it again.
            URL(f"{settings.host}{path}{ending}", encoded=True),
            data=None if body is None else to_json(body),
            headers=sent,
            timeout=limits,
            server_hostname=settings.tls_server_name,
            proxy=settings.proxy,
            proxy_headers=settings.proxy_headers,
        )


def _proxy_of(server: str) -> str | None:
    """The proxy that the environment names for a server (HTTPS_PROXY, NO_PROXY)."""
    url = urlsplit(server)
    if proxy_bypass(url.netloc):
        return None
    return getproxies().get(url.scheme)


def path_of(kind: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """The API server's path of a kind, an object or a subresource."""
    resource = RESOURCES[kind]
    root = "/api" if "/" not in resource.api_version else "/apis"
    parts = [root, resource.api_version]
    if namespace:
        parts += ["namespaces", namespace]
    parts += [part for part in (resource.plural, name, subresource) if part]
    return "/".join(parts)


def object_path(ref: Ref, subresource: str = "") -> str:
    """The path of one object."""
    return path_of(ref.kind, ref.namespace, ref.name, subresource)


def _parse_event(path: str, line: bytes) -> dict[str, Any]:
    event = _parse_json(line)
    if event.get("type") == "ERROR":
        if event.get("object", {}).get("code") == 410:
            raise GoneError(path)
        raise ClusterError(f"watch {path}: {event.get('object', {}).get('message')}")
    return event


def _parse_json(data: bytes) -> dict[str, Any]:
    try:
        # Twice as fast as json, and shares equal strings in memory.
        found: dict[str, Any] = from_json(data)
    except ValueError as cause:
        raise ClusterError(f"no JSON: {data[:80]!r}") from cause
    return found


def resource_of(path: str) -> str:
    """The plural of the resource in a path."""
    parts = path.split("/")
    after = parts.index("namespaces") + 2 if "namespaces" in parts else 3
    if parts[1] == "apis" and "namespaces" not in parts:
        after = 4
    return parts[after] if len(parts) > after else parts[-1]
