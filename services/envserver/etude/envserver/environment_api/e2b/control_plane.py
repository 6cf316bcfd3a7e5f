"""Control plane of E2B's API: create, list, extend, pause and end sandboxes."""

import datetime
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.common.errors import InvalidFieldError, WrongStateError
from etude.envserver.environment_api.api_keys import ApiCaller, ApiKeys, KeyRole, UnknownKeyError
from etude.envserver.environment_api.e2b import connect_protocol
from etude.envserver.environment_api.e2b.connect_protocol import Json
from etude.envserver.environment_api.sandboxes import (
    MAX_LIFE_S,
    ClientSandbox,
    ClientSandboxes,
    SandboxRequest,
)

ENVD_VERSION = "0.5.7"
"""Version whose features clients may expect: uploads as they are, and input that ends."""
_DEFAULT_LIFE_S = 300
_PAGE = 100
_CPUS = 1
"""A VM has one, and no pool gives more."""
_MAX_METADATA = 16 << 10
_REFUSED = ("network", "mcp", "iam", "volumeMounts", "autoResume")
"""Options that sandboxes here do not support; rejected rather than ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSize:
    """Size of each sandbox, as clients are told."""

    memory_mib: int
    disk_mib: int


@dataclass(frozen=True, slots=True)
class E2bControlPlane:
    """The routes of the control plane."""

    keys: ApiKeys
    sandboxes: ClientSandboxes
    size: SandboxSize

    def routes(self) -> list[Route]:
        one = "/sandboxes/{name}"
        return [
            Route("/v2/sandboxes", self._create, methods=["POST"]),
            Route("/sandboxes", self._create, methods=["POST"]),
            Route("/v2/sandboxes", self._list, methods=["GET"]),
            Route(one, self._get, methods=["GET"]),
            Route(one, self._kill, methods=["DELETE"]),
            Route(one + "/timeout", self._timeout, methods=["POST"]),
            Route(one + "/refreshes", self._timeout, methods=["POST"]),
            Route(one + "/connect", self._connect, methods=["POST"]),
            Route("/v2" + one + "/connect", self._connect, methods=["POST"]),
            Route(one + "/resume", self._connect, methods=["POST"]),
            Route(one + "/pause", self._pause, methods=["POST"]),
        ]

    def _caller(self, request: Request) -> ApiCaller:
        caller = self.keys.identify(request.headers.get("x-api-key", ""))
        if caller.role is not KeyRole.FULL:
            raise UnknownKeyError(f"key {caller.name} is valid for tools only")
        return caller

    async def _create(self, request: Request) -> Response:
        caller = self._caller(request)
        content = await _content(request)
        for name in _REFUSED:
            if content.get(name):
                raise InvalidFieldError(name, "is not supported by this API")
        if content.get("allow_internet_access"):
            raise InvalidFieldError("allow_internet_access", "sandboxes here have no network")
        wish = SandboxRequest(
            template=connect_protocol.text_field(content, "templateID"),
            life_s=_life_s(content),
            metadata=_metadata(content),
            env=connect_protocol.text_map_field(content, "envVars"),
            pauses=bool(content.get("autoPause")),
        )
        key = request.headers.get("idempotency-key", "")[:255]
        made = await self.sandboxes.create(caller, wish, request_key=key)
        return JSONResponse(_describe_new(made), 201)

    async def _list(self, request: Request) -> Response:
        caller = self._caller(request)
        wanted = {
            unquote(name): unquote(value)
            for name, value in parse_qsl(request.query_params.get("metadata", ""))
        }
        states = request.query_params.get("state", "running,paused").split(",")
        found = [
            sandbox
            for sandbox in self.sandboxes.list_own(caller)
            if wanted.items() <= sandbox.request.metadata.items()
            and _state(sandbox) in states
            and request.query_params.get("template", sandbox.request.template)
            == sandbox.request.template
        ]
        start = connect_protocol.number_field(request.query_params, "nextToken", most=1 << 20)
        limit = connect_protocol.number_field(request.query_params, "limit", most=_PAGE) or _PAGE
        page = [_describe(sandbox, self.size) for sandbox in found[start : start + limit]]
        more = {"x-next-token": str(start + limit)} if len(found) > start + limit else {}
        return JSONResponse(page, headers=more)

    async def _get(self, request: Request) -> Response:
        sandbox = self._sandbox(request)
        token = {"envdAccessToken": sandbox.token, "domain": None}
        return JSONResponse(_describe(sandbox, self.size) | token)

    async def _kill(self, request: Request) -> Response:
        await self.sandboxes.end(self._sandbox(request))
        return Response(status_code=204)

    async def _timeout(self, request: Request) -> Response:
        sandbox = self._sandbox(request)
        content = await _content(request)
        sandbox.ends_s = time.time() + _life_s(content)
        return Response(status_code=204)

    async def _connect(self, request: Request) -> Response:
        sandbox = self._sandbox(request)
        content = await _content(request)
        if sandbox.is_paused:
            await self.sandboxes.resume(sandbox, _life_s(content))
            return JSONResponse(_describe_new(sandbox), 201)
        if "timeout" in content:
            sandbox.ends_s = max(sandbox.ends_s, time.time() + _life_s(content))
        return JSONResponse(_describe_new(sandbox))

    async def _pause(self, request: Request) -> Response:
        sandbox = self._sandbox(request)
        if sandbox.is_paused:
            raise WrongStateError(f"sandbox {sandbox.name} is paused already")
        await self.sandboxes.pause(sandbox)
        return Response(status_code=204)

    def _sandbox(self, request: Request) -> ClientSandbox:
        return self.sandboxes.find_own(self._caller(request), request.path_params["name"])


async def _content(request: Request) -> Json:
    return await connect_protocol.read_message(request)


def _life_s(content: Json) -> int:
    wanted = connect_protocol.number_field(content, "timeout", most=MAX_LIFE_S)
    return wanted if "timeout" in content else _DEFAULT_LIFE_S


def _metadata(content: Json) -> Mapping[str, str]:
    metadata = connect_protocol.text_map_field(content, "metadata")
    if len(json.dumps(metadata)) > _MAX_METADATA:
        raise InvalidFieldError("metadata", f"is longer than {_MAX_METADATA >> 10} KiB")
    return metadata


def _describe_new(sandbox: ClientSandbox) -> dict[str, Any]:
    return {
        "templateID": sandbox.request.template,
        "sandboxID": sandbox.name,
        "clientID": "etude",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": sandbox.token,
        "toolsAccessToken": sandbox.tools_token,
        "domain": None,
    }


def _describe(sandbox: ClientSandbox, size: SandboxSize) -> dict[str, Any]:
    return {
        "templateID": sandbox.request.template,
        "sandboxID": sandbox.name,
        "clientID": "etude",
        "startedAt": _time(sandbox.started_s),
        "endAt": _time(math.ceil(sandbox.ends_s)),
        "cpuCount": _CPUS,
        "memoryMB": size.memory_mib,
        "diskSizeMB": size.disk_mib,
        "state": _state(sandbox),
        "envdVersion": ENVD_VERSION,
        "metadata": dict(sandbox.request.metadata),
    }


def _state(sandbox: ClientSandbox) -> str:
    return "paused" if sandbox.is_paused else "running"


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC).isoformat()
