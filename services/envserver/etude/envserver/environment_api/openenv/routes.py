"""OpenEnv's server protocol: /openenv/KEY/TEMPLATE is the base address of one client.

Its clients can send no header, so the key is part of the address. A key for tools makes it a server
in production, which has tools and no reset, step or state.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from etude.common.errors import EtudeError
from etude.envserver.environment_api.api_keys import ApiKeys, KeyRole
from etude.envserver.environment_api.openenv.session import (
    Action,
    ErrorCode,
    Observation,
    OpenEnvSession,
    ResetRequest,
    SessionError,
    State,
    StepRequest,
    answer_rpc,
    parse_model,
)
from etude.envserver.environment_api.pool_client import PoolClient
from etude.envserver.environment_api.sandboxes import ClientSandboxes

_BASE = "/openenv/{key}/{template}"
_VERSION = "1.0.0"
"""Of the protocol's description."""
_ALWAYS = ("/health", "/metadata", "/schema", "/mcp")
_SIMULATION = ("/reset", "/step", "/state")
_REFUSED = 1008
"""Close code of a WebSocket: it may not be here."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OpenEnvServer:
    """Environments as OpenEnv's clients know them."""

    keys: ApiKeys
    pool: PoolClient
    sandboxes: ClientSandboxes

    def routes(self) -> list[BaseRoute]:
        answers: dict[str, Callable[[OpenEnvSession, Request], Awaitable[Response]]] = {
            "GET /health": _health,
            "GET /metadata": _metadata,
            "GET /schema": _schema,
            "GET /openapi.json": _openapi,
            "POST /mcp": _mcp,
            "POST /reset": _reset,
            "POST /step": _step,
            "GET /state": _state,
        }
        routes: list[BaseRoute] = []
        for name, answer in answers.items():
            method, path = name.split()
            routes.append(Route(_BASE + path, self._endpoint(answer), methods=[method]))
        return [
            *routes,
            WebSocketRoute(_BASE + "/ws", self._serve_socket),
            WebSocketRoute(_BASE + "/mcp", self._serve_mcp_socket),
        ]

    def _endpoint(
        self, answer: Callable[[OpenEnvSession, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            async with self._session(request) as session:
                try:
                    return await answer(session, request)
                except SessionError as error:
                    return JSONResponse({"detail": _error_body(error)}, _status(error.error_code))

        return endpoint

    @contextlib.asynccontextmanager
    async def _session(self, connection: HTTPConnection) -> AsyncIterator[OpenEnvSession]:
        caller = self.keys.identify(connection.path_params["key"])
        template = connection.path_params["template"]
        session = OpenEnvSession(self.pool, self.sandboxes, caller, template)
        try:
            yield session
        finally:
            await session.close()

    async def _serve_socket(self, socket: WebSocket) -> None:
        async with self._accept_socket(socket) as session:
            await session.open()
            while (message := await _receive_json(socket)) is not None:
                if message == {"type": "close"}:
                    return
                await socket.send_json(await _answer_message(session, message))

    async def _serve_mcp_socket(self, socket: WebSocket) -> None:
        async with self._accept_socket(socket) as session:
            while (message := await _receive_json(socket)) is not None:
                await socket.send_json(await answer_rpc(session, message))

    @contextlib.asynccontextmanager
    async def _accept_socket(self, socket: WebSocket) -> AsyncIterator[OpenEnvSession]:
        """A session that lasts as long as its connection."""
        try:
            async with self._session(socket) as session:
                await socket.accept()
                try:
                    with contextlib.suppress(WebSocketDisconnect):
                        yield session
                except SessionError as error:
                    await socket.send_json({"type": "error", "data": _error_body(error)})
                    await socket.close()
        except EtudeError:
            await socket.close(_REFUSED)


async def _receive_json(socket: WebSocket) -> object:
    """Receive the next message; what is not JSON is answered with an error and skipped.

    Raises:
        WebSocketDisconnect: the client has gone.
    """
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        text = message.get("text")
        why = "Invalid JSON"
        if text is None:
            why = "Messages are text: a binary one is not read"
        else:
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(text)
        error = SessionError(ErrorCode.INVALID_JSON, why)
        await socket.send_json({"type": "error", "data": _error_body(error)})


async def _answer_message(session: OpenEnvSession, message: object) -> Json:
    content = message if isinstance(message, dict) else {}
    try:
        return await _perform(session, content.get("type"), content.get("data"))
    except SessionError as error:
        return {"type": "error", "data": _error_body(error)}


async def _perform(session: OpenEnvSession, kind: object, data: object) -> Json:
    is_simulation = session.caller.role is KeyRole.FULL
    match kind:
        case "reset" if is_simulation:
            return {
                "type": "observation",
                "data": await session.reset({} if data is None else data),
            }
        case "step" if is_simulation:
            return {"type": "observation", "data": await session.step(data)}
        case "state" if is_simulation:
            return {"type": "state", "data": session.state.model_dump()}
        case "mcp":
            return {"type": "mcp", "data": await answer_rpc(session, data)}
        case _:
            what = f"Unknown message type: {str(kind)[:80]}"
            raise SessionError(ErrorCode.UNKNOWN_TYPE, what)


def _error_body(error: SessionError) -> Json:
    told: Json = {"message": str(error), "code": error.error_code.value}
    return told | ({"errors": error.details} if error.details else {})


def _status(code: ErrorCode) -> int:
    statuses = {
        ErrorCode.VALIDATION_ERROR: 422,
        ErrorCode.UNKNOWN_TYPE: 404,
        ErrorCode.INVALID_JSON: 400,
        ErrorCode.CAPACITY_REACHED: 503,
    }
    return statuses.get(code, 500)


async def _health(_: OpenEnvSession, __: Request) -> Response:
    return JSONResponse({"status": "healthy"})


async def _metadata(session: OpenEnvSession, _: Request) -> Response:
    what = "A repository and the tools to work in it; one environment for each episode."
    return JSONResponse({"name": session.template, "description": what, "version": "1"})


async def _schema(_: OpenEnvSession, __: Request) -> Response:
    models: dict[str, type[BaseModel]] = {
        "action": Action,
        "observation": Observation,
        "state": State,
    }
    return JSONResponse({name: model.model_json_schema() for name, model in models.items()})


async def _openapi(session: OpenEnvSession, _: Request) -> Response:
    paths = (*_ALWAYS, *(_SIMULATION if session.caller.role is KeyRole.FULL else ()))
    described = {
        path: {_method(path): {"responses": {"200": {"description": "OK"}}}} for path in paths
    }
    info = {"title": "Environments", "version": _VERSION}
    return JSONResponse({"openapi": "3.1.0", "info": info, "paths": described})


def _method(path: str) -> str:
    return "post" if path in {"/mcp", "/reset", "/step"} else "get"


async def _mcp(session: OpenEnvSession, request: Request) -> Response:
    return JSONResponse(await answer_rpc(session, await _body(request)))


async def _reset(session: OpenEnvSession, request: Request) -> Response:
    _require_simulation(session)
    content = await _body(request) or {}
    parse_model(ResetRequest, content)
    return JSONResponse(await session.reset(content))


async def _step(session: OpenEnvSession, request: Request) -> Response:
    _require_simulation(session)
    step = parse_model(StepRequest, await _body(request))
    answer = await session.step(step.action.model_dump(), timeout_s=step.timeout_s)
    headers = {"X-Request-ID": quote(step.request_id)} if step.request_id else None
    return JSONResponse(answer, headers=headers)


async def _state(session: OpenEnvSession, _: Request) -> Response:
    _require_simulation(session)
    return JSONResponse(session.state.model_dump())


def _require_simulation(session: OpenEnvSession) -> None:
    if session.caller.role is not KeyRole.FULL:
        raise SessionError(ErrorCode.UNKNOWN_TYPE, "Not Found")


async def _body(request: Request) -> Any:  # noqa: ANN401 - any JSON
    try:
        return json.loads(await request.body() or b"null")
    except (ValueError, RecursionError) as error:
        raise SessionError(ErrorCode.INVALID_JSON, "Invalid JSON") from error
