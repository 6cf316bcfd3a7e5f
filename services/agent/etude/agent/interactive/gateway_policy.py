"""A policy behind a gateway: its conversation in the messages of OpenAI's chat completions.

The gateway owns the tokens. It is told the form of tools that the policy was trained with
(`x-etude-tool-format`), lists calls that do not parse in their places, and is sent every result
by the id of its call: so it renders what a training rollout renders, token for token.
"""

import asyncio
import http.client
import json
import socket
import ssl
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

from typing_extensions import override

from etude.agent.tool_calls import MalformedCall, ParsedCall, read_json
from etude.agent.tools.base import ToolOutcome
from etude.agent.toolsets import Toolset
from etude.agent.trajectory import RolloutEnding
from etude.agent.turns import PlatformFaultError, PolicyConversation, PolicyTurn
from etude.common.errors import Problem, UserError

ToolFormatName = Literal["Xml", "Native"]
"""As `rollout.toolFormat` of the run that trained the policy."""
CHAT = "/v1/chat/completions"
_ANSWER_S = 900.0
"""For one turn: a gateway ends turns earlier."""
_CONNECT_S = 10.0
"""For a connection, which nothing interrupts."""
_MAX_ANSWER_BYTES = 64 << 20
_ATTEMPTS = 4
_LONGEST_WAIT_S = 30.0
STOPPED = "Error: the work was stopped here; the call may have run"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayAddress:
    """A served model."""

    url: str
    model: str
    key: str = field(repr=False)
    """API key with the scope serve."""


class TurnAnswer(NamedTuple):
    """One answer of the gateway."""

    message: Mapping[str, Any]
    finish_reason: str
    policy_version: str


@dataclass(slots=True)
class GatewayPolicy(PolicyConversation):
    """The policy of one conversation."""

    address: GatewayAddress
    tools: Toolset
    tool_format: ToolFormatName
    max_turn_tokens: int
    temperature: float = 1.0
    rollout: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Named here: the gateway finds a conversation again by it."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    policy_version: str = ""
    """That sampled the last turn."""
    num_turns: int = 0
    """Turns of the rollout so far."""

    def __post_init__(self) -> None:
        is_native = self.tool_format == "Native"
        system = self.tools.native_prompt if is_native else self.tools.system_prompt
        self.messages.append({"role": "system", "content": system})

    @property
    def last_text(self) -> str:
        """Text of the last message."""
        return self.messages[-1].get("content") or ""

    def add_instruction(self, text: str) -> None:
        """Append what the user says, in place of an instruction that has no answer."""
        self._answer_open_calls()
        if self.messages[-1]["role"] == "user":
            self.messages.pop()
        self.messages.append({"role": "user", "content": text})

    @override
    async def sample(self, turn: int) -> PolicyTurn:
        answer = await self._ask()
        message = answer.message
        calls = message.get("tool_calls") or []
        kept: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
        if calls:
            kept["tool_calls"] = calls
        self.messages.append(kept)
        self.policy_version = answer.policy_version
        self.num_turns += 1
        is_cut = answer.finish_reason == "length"
        # Of a turn that was cut, no call runs: the loop ends.
        return PolicyTurn(
            [] if is_cut else [_read_call(call) for call in calls],
            message.get("content") or "",
            is_cut=is_cut,
        )

    @override
    def append_results(self, outcomes: Sequence[ToolOutcome]) -> RolloutEnding | None:
        calls = self.messages[-1]["tool_calls"]
        for call, outcome in zip(calls, outcomes, strict=True):
            self._append_result(call, outcome.content)
        return None

    def _append_result(self, call: Mapping[str, Any], content: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    def _answer_open_calls(self) -> None:
        """Answer the calls of a last turn that ended the work, or was stopped."""
        for call in self.messages[-1].get("tool_calls", ()):
            is_end = call["function"]["name"] == "finish"
            self._append_result(call, "Finished." if is_end else STOPPED)

    async def _ask(self) -> TurnAnswer:
        """Ask for one turn; again if the gateway is busy for now.

        Raises:
            PlatformFaultError: it does not answer.
            UserError: it refuses the request.
        """
        body: dict[str, Any] = {
            "model": self.address.model,
            "messages": self.messages,
            "tools": self.tools.schemas(),
            "temperature": self.temperature,
            "max_completion_tokens": self.max_turn_tokens,
        }
        request = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        attempt = 0
        while True:
            exchange = _Exchange(self.address, self._headers(), request)
            status, headers, data = await exchange.run()
            if status == 200:
                return _read_answer(headers, data)
            attempt += 1
            if status not in {429, 503} or attempt == _ATTEMPTS:
                _refuse(self.address, status, data)
            await asyncio.sleep(_read_wait(headers, attempt))

    def _headers(self) -> Mapping[str, str]:
        return {
            "content-type": "application/json",
            "authorization": f"Bearer {self.address.key}",
            "x-etude-rollout": self.rollout,
            "x-etude-tool-format": self.tool_format,
        }


@dataclass(slots=True)
class _Exchange:
    """One request; the end of its task ends it too."""

    address: GatewayAddress
    headers: Mapping[str, str]
    body: bytes
    _connection: http.client.HTTPConnection | None = None

    async def run(self) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of the answer.

        Raises:
            PlatformFaultError: none comes.
            CancelledError: the task was cancelled.
        """
        try:
            return await asyncio.to_thread(self._run)
        except asyncio.CancelledError:
            # Its thread waits for the gateway, and the process for its threads.
            if self._connection is not None and self._connection.sock is not None:
                self._connection.sock.shutdown(socket.SHUT_RDWR)
            raise
        except (OSError, http.client.HTTPException) as error:
            raise PlatformFaultError(f"{self.address.url} does not answer: {error}") from error

    def _run(self) -> tuple[int, Mapping[str, str], bytes]:
        parts = urllib.parse.urlsplit(self.address.url)
        host = parts.hostname or ""
        if parts.scheme == "https":
            context = ssl.create_default_context()
            self._connection = http.client.HTTPSConnection(
                host, parts.port, timeout=_CONNECT_S, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(host, parts.port, timeout=_CONNECT_S)
        try:
            path = parts.path.rstrip("/").removesuffix("/v1") + CHAT
            self._connection.connect()
            self._connection.sock.settimeout(_ANSWER_S)
            self._connection.request("POST", path, self.body, dict(self.headers))
            response = self._connection.getresponse()
            data = response.read(_MAX_ANSWER_BYTES)
            headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, headers, data
        finally:
            self._connection.close()


def _read_answer(headers: Mapping[str, str], data: bytes) -> TurnAnswer:
    """Read an answer of the gateway.

    Raises:
        PlatformFaultError: it is no answer to a chat.
    """
    try:
        choice = json.loads(data)["choices"][0]
        message, finish = choice["message"], str(choice["finish_reason"])
        calls = message.get("tool_calls") or []
        functions = [call["function"] for call in calls]
        texts = [message.get("content") or "", *(call["id"] for call in calls)]
        texts += [text for each in functions for text in (each["name"], each["arguments"])]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise PlatformFaultError("the gateway's answer is none of a chat") from None
    if not all(isinstance(text, str) for text in texts):
        raise PlatformFaultError("the gateway's answer is none of a chat")
    return TurnAnswer(message, finish, headers.get("x-policy-version", ""))


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


def _read_wait(headers: Mapping[str, str], attempt: int) -> float:
    text = headers.get("retry-after", "")
    asked_s = float(text) if text.isascii() and text.isdecimal() and len(text) < 8 else 0.0
    return min(_LONGEST_WAIT_S, max(asked_s, 0.5 * 2.0**attempt))


def _refuse(address: GatewayAddress, status: int, data: bytes) -> NoReturn:
    """Turn an answer other than 200 into an error.

    Raises:
        UserError: for what the user can correct.
        PlatformFaultError: for everything else.
    """
    try:
        what = str(json.loads(data)["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError, RecursionError):
        what = f"answered {status}"
    where = f"gateway {address.url}"
    if status in {401, 403}:
        fix = "set ETUDE_API_KEY to a key with the scope serve: etude-gateway key USER serve"
        raise UserError(Problem("Forbidden", what, where, fix))
    if status == 404:
        fix = f"ask for a served model: curl {address.url}/v1/models"
        raise UserError(Problem("NotFound", what, where, fix))
    if 400 <= status < 500 and status != 429:
        fix = "shorten the conversation, or start a new one"
        raise UserError(Problem("InvalidArgument", what, where, fix))
    raise PlatformFaultError(f"{where}: {what}")
