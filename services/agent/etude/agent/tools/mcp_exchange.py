"""Exchange with an MCP server over its standard streams: start it, ask once, end it.

The exchange is a script for the environment's own shell, so the server is as confined as any
command of the policy, and nothing of it is left between two calls but files.

Covered: servers that never answer (the caller's time limit), that answer too much (cut off, then
refused), that answer something else (refused), that end early (their last words are the error).
Not covered: requests of the server to its client, and progress.
"""

import json
import shlex
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from etude.agent.tools.base import ErrorKind, ToolError
from etude.agent.workspace import ExecResult

PROTOCOL_VERSION = "2025-06-18"
"""Of https://modelcontextprotocol.io; servers may answer with another."""
MAX_REQUEST_BYTES = 64 << 10
"""The script is one argument of `sh -c`, and the kernel takes 128 KiB."""
MAX_ANSWER_BYTES = 60 << 10
"""Sandboxes pass 64 KiB of a command's output on."""
_MAX_WORDS = 500
_OPENING, _ID = "etude-1", "etude-2"
_SCRIPT = """\
d=$(mktemp -d) && mkfifo "$d/in" "$d/out" || exit 1
{server} <"$d/in" >"$d/out" 2>"$d/errors" &
trap 'kill $! 2>/dev/null; rm -rf "$d"' EXIT
trap '' PIPE
exec 3>"$d/in" 4<"$d/out"
printf '%s\\n' {initialize} >&3 2>/dev/null
while IFS= read -r line <&4; do case $line in *'"{opening}"'*) break;; esac; done
printf '%s\\n' {initialized} {request} >&3 2>/dev/null
grep -m 1 '"{id}"' <&4 | head -c {limit} >"$d/answer"
[ -s "$d/answer" ] || {{ tail -c {words} "$d/errors"; exit 1; }}
cat "$d/answer"
"""


class _Fault(BaseModel):
    model_config = ConfigDict(frozen=True)

    message: str = "no reason given"


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)

    id: str
    result: dict[str, JsonValue] | None = None
    error: _Fault | None = None


def write_script(
    server: Sequence[str],
    method: str,
    parameters: Mapping[str, JsonValue],
    *,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> str:
    """Write the shell script that starts a server, sends it one request, and prints the answer.

    Raises:
        ToolError: the request is too large, or holds half a character.
    """
    opening: dict[str, JsonValue] = {
        "protocolVersion": PROTOCOL_VERSION,
        "capabilities": {},
        "clientInfo": {"name": "etude", "version": "1"},
    }
    request = _line({"id": _ID, "method": method, "params": dict(parameters)})
    try:
        num_bytes = len(request.encode())
    except UnicodeEncodeError as cause:
        raise ToolError("the arguments hold half a character", ErrorKind.INVALID) from cause
    if num_bytes > MAX_REQUEST_BYTES:
        what = f"the arguments are longer than {MAX_REQUEST_BYTES} bytes"
        raise ToolError(what, ErrorKind.INVALID)
    return _SCRIPT.format(
        server=shlex.join(server),
        initialize=_line({"id": _OPENING, "method": "initialize", "params": opening}),
        initialized=_line({"method": "notifications/initialized"}),
        request=request,
        opening=_OPENING,
        id=_ID,
        limit=max_bytes,
        words=_MAX_WORDS,
    )


def _line(message: Mapping[str, JsonValue]) -> str:
    """A message on one line, quoted for the shell; no quote in it needs more than six bytes."""
    text = json.dumps({"jsonrpc": "2.0", **message}, ensure_ascii=False)
    return "'" + text.replace("'", "\\u0027") + "'"


def read_answer(done: ExecResult, *, max_bytes: int = MAX_ANSWER_BYTES) -> Mapping[str, JsonValue]:
    """Read the result that the script printed.

    Raises:
        ToolError: there is none; the text says why.
    """
    if done.timed_out:
        raise ToolError("the server did not answer in time", ErrorKind.TIMEOUT)
    if done.dropped_bytes or len(done.output) >= max_bytes:
        raise ToolError("the server's answer is too large: ask for less")
    text = done.output.decode(errors="replace").strip()
    if done.exit_code:
        raise ToolError(f"the server ended without an answer: {text[-_MAX_WORDS:] or 'no output'}")
    try:
        answer = _Answer.model_validate_json(text)
    except ValidationError as cause:
        raise ToolError("the server's answer is no JSON-RPC message") from cause
    if answer.id != _ID:
        raise ToolError("the server's answer is to another request")
    if answer.error is not None:
        raise ToolError(answer.error.message[:_MAX_WORDS])
    if answer.result is None:
        raise ToolError("the server's answer has no result")
    return answer.result
