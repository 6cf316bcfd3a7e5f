"""Programs of a sandbox over envd's API: start, connect, input and signals."""

import base64
import binascii
import math
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from etude.common.errors import InvalidFieldError
from etude.envserver.drivers import programs as limits
from etude.envserver.environment_api.e2b import connect_protocol
from etude.envserver.environment_api.e2b.client_paths import workspace_path
from etude.envserver.environment_api.e2b.connect_protocol import Json
from etude.envserver.environment_api.sandbox_programs import SharedProgram, StartedProgram
from etude.envserver.environment_api.sandboxes import ClientSandbox
from etude.v1 import environment_access_pb2 as pb2

_HOME = {"HOME": "/workspace", "USER": "user"}
_SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL}
_MAX_NUMBER = 2**31


async def answer_rpc(sandbox: ClientSandbox, method: str, request: Request) -> Response:
    """Answer one RPC of process.Process."""
    content = await connect_protocol.read_message(request)
    if method in _STREAMS:
        events = _STREAMS[method](sandbox, content, request.headers)
        return connect_protocol.stream_response(
            await events, keepalive_s=_keepalive_s(request.headers)
        )
    if method == "List":
        found = [_info(program) for program in sandbox.programs.running()]
        return JSONResponse({"processes": found})
    if method not in _STEPS:
        return connect_protocol.error_response(
            {"code": "unimplemented", "message": f"no process.{method[:80]}"}
        )
    selector = connect_protocol.object_field(content, "process")
    await _select_program(sandbox, selector).send(**_STEPS[method](content))
    return JSONResponse({})


async def _start(
    sandbox: ClientSandbox, content: Json, headers: Mapping[str, str]
) -> AsyncIterator[Json]:
    opened = _exec_request(sandbox, content, headers)
    started = await sandbox.programs.start(opened, connect_protocol.text_field(content, "tag"))
    if not content.get("stdin", True) and not started.program.is_terminal:
        await started.program.send(close_stdin=pb2.CloseStdin())
    return _events(started)


async def _connect(
    sandbox: ClientSandbox, content: Json, headers: Mapping[str, str]
) -> AsyncIterator[Json]:
    program = _select_program(sandbox, connect_protocol.object_field(content, "process"))
    return _events(StartedProgram(program, program.subscribe()))


_STREAMS: Mapping[
    str, Callable[[ClientSandbox, Json, Mapping[str, str]], Awaitable[AsyncIterator[Json]]]
] = {"Start": _start, "Connect": _connect}


def _exec_request(
    sandbox: ClientSandbox, content: Json, headers: Mapping[str, str]
) -> pb2.ExecOpen:
    process = connect_protocol.object_field(content, "process")
    arguments = process.get("args") or []
    if not isinstance(arguments, list) or not all(isinstance(each, str) for each in arguments):
        raise InvalidFieldError("process.args", "is not a list of text")
    opened = pb2.ExecOpen(
        argv=pb2.ArgumentList(arguments=[connect_protocol.text_field(process, "cmd"), *arguments]),
        cwd=workspace_path(connect_protocol.text_field(process, "cwd")),
        env={**_HOME, **sandbox.request.env, **connect_protocol.text_map_field(process, "envs")},
        timeout_seconds=_timeout_s(headers),
    )
    if content.get("pty"):
        opened.terminal.CopyFrom(_size(content))
    return opened


def _timeout_s(headers: Mapping[str, str]) -> int:
    given = headers.get("connect-timeout-ms", "")
    if not given.isdecimal() or len(given) > 12:
        return limits.MAX_TIMEOUT_S
    return max(1, min(math.ceil(int(given) / 1000), limits.MAX_TIMEOUT_S))


def _keepalive_s(headers: Mapping[str, str]) -> float | None:
    given = headers.get("keepalive-ping-interval", "")
    return max(1.0, float(given)) if given.isdecimal() and len(given) < 6 else None


def _size(content: Json) -> pb2.TerminalSize:
    size = connect_protocol.object_field(connect_protocol.object_field(content, "pty"), "size")
    most = limits.MAX_TERMINAL
    return pb2.TerminalSize(
        rows=connect_protocol.number_field(size, "rows", most=most) or 24,
        columns=connect_protocol.number_field(size, "cols", most=most) or 80,
    )


def _input(content: Json) -> dict[str, Any]:
    given = connect_protocol.object_field(content, "input")
    data = connect_protocol.text_field(given, "stdin") or connect_protocol.text_field(given, "pty")
    try:
        return {"stdin": base64.b64decode(data, validate=True)}
    except (binascii.Error, ValueError) as error:
        raise InvalidFieldError("input", "is not base64") from error


def _signal(content: Json) -> dict[str, Any]:
    name = connect_protocol.text_field(content, "signal")
    if name not in _SIGNALS:
        raise InvalidFieldError("signal", f"must be one of {', '.join(_SIGNALS)}")
    return {"signal": int(_SIGNALS[name])}


_STEPS: Mapping[str, Callable[[Json], dict[str, Any]]] = {
    "SendInput": _input,
    "SendSignal": _signal,
    "CloseStdin": lambda _: {"close_stdin": pb2.CloseStdin()},
    "Update": lambda content: {"resize": _size(content)},
}


def _select_program(sandbox: ClientSandbox, selector: Json) -> SharedProgram:
    number = (
        connect_protocol.number_field(selector, "pid", most=_MAX_NUMBER)
        if "pid" in selector
        else None
    )
    return sandbox.programs.find(number, connect_protocol.text_field(selector, "tag") or None)


async def _events(started: StartedProgram) -> AsyncIterator[Json]:
    program = started.program
    yield {"start": {"pid": program.number}}
    channel = "pty" if program.is_terminal else "stdout"
    async for news in program.listen(started.queue):
        if news.HasField("exit"):
            yield {"end": _end(news.exit)}
        elif news.stdout:
            yield {"data": {channel: base64.b64encode(news.stdout).decode()}}
        elif news.stderr:
            yield {"data": {"stderr": base64.b64encode(news.stderr).decode()}}


def _end(ending: pb2.ExecExit) -> Json:
    end: Json = {
        "exitCode": ending.exit_code,
        "exited": ending.exit_code < 128,
        "status": f"exit status {ending.exit_code}",
    }
    if ending.ended_for:
        end["error"] = f"ended by the limit on {ending.ended_for}"
    return end


def _info(program: SharedProgram) -> Json:
    command, *arguments = program.opened.argv.arguments
    config = {
        "cmd": command,
        "args": arguments,
        "envs": dict(program.opened.env),
        "cwd": program.opened.cwd,
    }
    info: Json = {"config": config, "pid": program.number}
    return info | ({"tag": program.tag} if program.tag else {})
