"""One request for a turn in OpenAI's chat completions, and the turn that its answer holds."""

import asyncio
import contextlib
import functools
import http.client
import json
import socket
import ssl
import urllib.parse
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, NamedTuple

from etude.agent.tool_calls import MalformedCall, ParsedCall, read_json
from etude.agent.turns import PlatformFaultError

MAX_ANSWER_BYTES = 64 << 20
_CONNECT_S = 10.0
"""For a connection, which nothing interrupts."""
_LONGEST_WAIT_S = 30.0


class TurnAnswer(NamedTuple):
    """One turn of the policy, in the protocol's form."""

    message: Mapping[str, Any]
    finish_reason: str
    usage: Mapping[str, Any]
    """Counts of tokens; empty where the endpoint gives none."""
    policy_version: str
    """Empty where the endpoint is no gateway of ours."""

    @property
    def calls(self) -> list[ParsedCall | MalformedCall]:
        """The calls of the turn, checked."""
        return [_read_call(call) for call in self.message.get("tool_calls") or []]


@dataclass(slots=True)
class ChatExchange:
    """One request; the end of its task ends it too. Redirects are answers: none is followed."""

    url: str
    headers: Mapping[str, str]
    body: bytes
    timeout_s: float
    """For each wait on the network."""
    executor: Executor | None = None
    """Threads to wait in; those of the loop unless set."""
    max_bytes: int = MAX_ANSWER_BYTES
    """Longest answer."""
    _connection: http.client.HTTPConnection | None = None

    async def run(self) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of the answer.

        Raises:
            PlatformFaultError: none comes, or it is too long.
            CancelledError: the task was cancelled.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.executor, self._run)
        except asyncio.CancelledError:
            # Its thread waits for the endpoint, and the process for its threads.
            if self._connection is not None and self._connection.sock is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    self._connection.sock.shutdown(socket.SHUT_RDWR)
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PlatformFaultError(f"{self.url} does not answer: {error}") from error

    def _run(self) -> tuple[int, Mapping[str, str], bytes]:
        parts = urllib.parse.urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme == "https":
            self._connection = http.client.HTTPSConnection(
                host, parts.port, timeout=_CONNECT_S, context=_tls_context()
            )
        else:
            self._connection = http.client.HTTPConnection(host, parts.port, timeout=_CONNECT_S)
        try:
            self._connection.connect()
            self._connection.sock.settimeout(self.timeout_s)
            self._connection.request("POST", parts.path, self.body, dict(self.headers))
            response = self._connection.getresponse()
            data = response.read(self.max_bytes + 1)
            headers = {name.lower(): value for name, value in response.getheaders()}
        finally:
            self._connection.close()
        if len(data) > self.max_bytes:
            raise ValueError(f"the answer has more than {self.max_bytes >> 20} MiB")
        return response.status, headers, data


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


def read_answer(headers: Mapping[str, str], data: bytes) -> TurnAnswer:
    """Read an answer to a chat.

    Raises:
        PlatformFaultError: it is none.
    """
    try:
        body = json.loads(data)
        choice = body["choices"][0]
        message, finish = choice["message"], str(choice["finish_reason"])
        calls = message.get("tool_calls") or []
        functions = [call["function"] for call in calls]
        texts = [message.get("content") or "", *(call["id"] for call in calls)]
        texts += [text for each in functions for text in (each["name"], each["arguments"])]
        usage = body.get("usage") or {}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise PlatformFaultError("the answer is none to a chat") from None
    if not isinstance(usage, dict) or not all(isinstance(text, str) for text in texts):
        raise PlatformFaultError("the answer is none to a chat")
    return TurnAnswer(message, finish, usage, headers.get("x-policy-version", ""))


def _read_call(call: Mapping[str, Any]) -> ParsedCall | MalformedCall:
    function = call["function"]
    text = function["arguments"]
    try:
        arguments = read_json(text)
    except ValueError as error:
        return MalformedCall(reason=f"the arguments are {error}", raw=text)
    if not isinstance(arguments, dict):
        return MalformedCall(reason="the arguments are not a JSON object", raw=text)
    if not function["name"]:
        reason, raw = str(arguments.get("reason", "")), str(arguments.get("raw", ""))
        return MalformedCall(reason=reason, raw=raw)
    return ParsedCall(name=function["name"], arguments=arguments)


def read_wait(headers: Mapping[str, str], attempt: int) -> float:
    """Seconds until the next attempt, numbered from 1: as asked for, or twice the last wait."""
    text = headers.get("retry-after", "")
    asked_s = float(text) if text.isascii() and text.isdecimal() and len(text) < 8 else 0.0
    return min(_LONGEST_WAIT_S, max(asked_s, 0.5 * 2.0 ** min(attempt, 10)))
