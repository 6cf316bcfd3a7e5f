"""Requests to a feedback service over HTTP, with the standard library alone."""

import http.client
import ssl
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

BATCH_TYPE = "application/cloudevents-batch+json"
EVENTS_PATH = "/v1/events"
_REQUEST_S = 40.0
"""For one request: the service waits for its store for 30 s."""
_MAX_ANSWER_BYTES = 64 << 20
"""A page of events has 8 MiB, and one event more, in which a character may be escaped."""


class HttpAnswer(NamedTuple):
    """Answer of the service."""

    status: int
    body: bytes
    retry_after_s: float = 0.0
    """0 if it does not say."""


@dataclass(frozen=True, slots=True)
class FeedbackHttp:
    """A feedback service over HTTP or HTTPS; no redirect is followed."""

    url: str
    """Such as "https://feedback.example.com"."""
    key: str = field(repr=False)
    """API key."""
    ca_file: Path | None = None
    """Certificates to trust instead of the system's."""

    def __post_init__(self) -> None:
        """Check the address.

        Raises:
            ValueError: it is no address of HTTP, or the key would leave this machine unencrypted.
        """
        check_address(self.url)

    def post(self, path: str, media_type: str, body: bytes) -> HttpAnswer:
        """Post one request.

        Raises:
            OSError: no answer comes.
            http.client.HTTPException: the answer is not HTTP.
        """
        return self._exchange("POST", path, {"content-type": media_type}, body)

    def get(self, path: str) -> HttpAnswer:
        """Get what is at a path, with its query.

        Raises:
            OSError: no answer comes.
            http.client.HTTPException: the answer is not HTTP.
        """
        return self._exchange("GET", path, {}, None)

    def _exchange(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None
    ) -> HttpAnswer:
        parts = urllib.parse.urlsplit(self.url)
        host = parts.hostname or ""
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=self.ca_file)
            connection = http.client.HTTPSConnection(
                host, parts.port, timeout=_REQUEST_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=_REQUEST_S)
        headers = headers | {"authorization": f"Bearer {self.key}"}
        try:
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            wait = response.getheader("retry-after", "")
            wait_s = float(wait) if wait.isascii() and wait.isdecimal() and len(wait) < 8 else 0.0
            return HttpAnswer(response.status, response.read(_MAX_ANSWER_BYTES), wait_s)
        finally:
            connection.close()


def check_address(url: str) -> None:
    """Check an address to which an API key is sent.

    Raises:
        ValueError: it is no address of HTTP, or the key would leave this machine unencrypted.
    """
    problem = "is no address that begins with https:// or http://"
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or an IPv6 address
        raise ValueError(problem) from None
    if not is_address:
        raise ValueError(problem)
    if parts.scheme == "http" and parts.hostname not in {"127.0.0.1", "::1", "localhost"}:
        raise ValueError("is not on this machine, and http:// would show the API key: use https://")
