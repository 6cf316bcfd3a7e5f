"""One environment as OpenEnv's clients drive it: reset, step, state; and its tools as JSON-RPC."""

import asyncio
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import grpc
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from etude.common.errors import EtudeError, FullError, UnknownIdError
from etude.envserver.environment_api import tool_calls
from etude.envserver.environment_api.api_keys import ApiCaller
from etude.envserver.environment_api.pool_client import PoolClient, public_error
from etude.envserver.environment_api.sandboxes import ClientSandbox, ClientSandboxes, SandboxRequest

_M = TypeVar("_M", bound=BaseModel)

LIFE_S = 3600
"""Of a session in which nothing happens."""
_FINISH = "finish"


class ErrorCode(StrEnum):
    """Error codes of the protocol."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Action(_Model):
    """One call of a tool."""

    tool: Annotated[str, Field(max_length=80)]
    """Its name."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Its arguments."""


class Observation(_Model):
    """Output of a tool."""

    text: str
    """For the policy to read."""
    is_error: bool = False
    """Whether the tool refused."""
    tools: list[dict[str, JsonValue]] = Field(default_factory=list)
    """After a reset: the tools that there are."""


class State(_Model):
    """Progress of an episode."""

    episode_id: str | None = None
    step_count: int = 0


class ResetRequest(_Model):
    """Options of a reset."""

    model_config = ConfigDict(extra="ignore")

    seed: Annotated[int | None, Field(ge=0)] = None
    """Taken and without effect: environments here begin alike."""
    episode_id: Annotated[str | None, Field(max_length=255)] = None


class StepRequest(_Model):
    """One step over HTTP."""

    action: Action
    timeout_s: Annotated[float | None, Field(gt=0)] = None
    """Longest wait for the answer; then the step is an error, and its environment ends with it."""
    request_id: Annotated[str | None, Field(max_length=255)] = None
    """Comes back in the answer's X-Request-ID, percent-encoded."""


class SessionError(EtudeError):
    """An error for the client, with a code of the protocol."""

    def __init__(self, code: ErrorCode, what: str, details: JsonValue = None) -> None:
        super().__init__(what)
        self.error_code = code
        self.details = details


@dataclass(slots=True)
class OpenEnvSession:
    """One client's environment; every episode has one of its own."""

    pool: PoolClient
    sandboxes: ClientSandboxes
    caller: ApiCaller
    template: str
    state: State = field(default_factory=State)
    _sandbox: ClientSandbox | None = None

    async def open(self) -> ClientSandbox:
        """The environment, launched if there is none.

        Raises:
            SessionError: none can be launched.
        """
        if self._sandbox is None:
            wish = SandboxRequest(template=self.template, life_s=LIFE_S, metadata={}, env={})
            try:
                self._sandbox = await self.sandboxes.create(self.caller, wish)
            except FullError as error:
                raise SessionError(ErrorCode.CAPACITY_REACHED, str(error)) from error
            except (EtudeError, grpc.aio.AioRpcError) as error:
                raise SessionError(ErrorCode.FACTORY_ERROR, public_error(error)[1]) from error
        return self._sandbox

    async def reset(self, content: object) -> dict[str, Any]:
        """Begin an episode in a fresh environment."""
        request = parse_model(ResetRequest, content)
        await self.close()
        await self.open()
        episode_id = request.episode_id or secrets.token_hex(8)
        self.state = State(episode_id=episode_id)
        tools: list[dict[str, JsonValue]] = [
            {"name": name, "description": text, "parameters": dict(parameters)}
            for name, text, parameters in tool_calls.tool_descriptions()
        ]
        return _result(Observation(text="", tools=tools), done=False)

    async def step(self, content: object, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Call one tool.

        Raises:
            SessionError: it is invalid, the platform failed, or it took too long.
        """
        action = parse_model(Action, content)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.call(action.tool, action.arguments)
        except TimeoutError as error:
            what = f"no answer in {timeout_s:g} s"
            raise SessionError(ErrorCode.EXECUTION_ERROR, what) from error
        self.state = State(episode_id=self.state.episode_id, step_count=self.state.step_count + 1)
        is_done = action.tool == _FINISH and not answer.is_error
        return _result(Observation(text=answer.text, is_error=answer.is_error), done=is_done)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> tool_calls.ToolAnswer:
        """Call a tool.

        Raises:
            SessionError: the platform failed.
        """
        sandbox = await self.open()
        try:
            self.sandboxes.extend(sandbox, LIFE_S)
            return await tool_calls.call_tool(self.pool, sandbox.lease, tool, arguments)
        except (UnknownIdError, grpc.aio.AioRpcError) as error:
            raise SessionError(ErrorCode.EXECUTION_ERROR, public_error(error)[1]) from error

    async def close(self) -> None:
        """End the environment."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self.sandboxes.end(sandbox)


async def answer_rpc(session: OpenEnvSession, raw: object) -> dict[str, Any]:
    """Answer one JSON-RPC message that lists or calls tools."""
    message = raw if isinstance(raw, dict) else {}
    number, params = message.get("id"), message.get("params") or {}
    try:
        match message.get("method"), params:
            case "tools/list", dict():
                result: dict[str, Any] = {"tools": _mcp_tools()}
            case "tools/call", {"name": str(name), **rest}:
                result = await _call_tool(session, name, rest.get("arguments") or {})
            case str(method), _ if method not in {"tools/list", "tools/call"}:
                return _rpc_error(number, -32601, f"no method {method[:80]!r}")
            case str(), _:
                return _rpc_error(number, -32602, "the parameters do not fit")
            case _:
                return _rpc_error(number, -32600, "this is no request")
    except SessionError as error:
        return _rpc_error(number, -32603, str(error))
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _mcp_tools() -> list[dict[str, Any]]:
    return [
        {"name": name, "description": text, "inputSchema": dict(parameters)}
        for name, text, parameters in tool_calls.tool_descriptions()
    ]


async def _call_tool(session: OpenEnvSession, name: str, arguments: object) -> dict[str, Any]:
    answer = await session.call(name, arguments if isinstance(arguments, dict) else {})
    return {"content": [{"type": "text", "text": answer.text}], "isError": answer.is_error}


def _rpc_error(number: object, code: int, message: str) -> dict[str, Any]:
    error = {"code": code, "message": message}
    return {"jsonrpc": "2.0", "id": number, "error": error}


def parse_model(model: type[_M], content: object) -> _M:
    """Parse the content of a client's message.

    Raises:
        SessionError: naming the invalid fields.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        wrong = json.loads(
            error.json(include_url=False, include_context=False, include_input=False)
        )
        raise SessionError(ErrorCode.VALIDATION_ERROR, "Invalid message", wrong) from error


def _result(observation: Observation, *, done: bool) -> dict[str, Any]:
    return {"observation": observation.model_dump(), "reward": None, "done": done}
