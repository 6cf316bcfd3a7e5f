"""The ASGI application: paths, keys, arms, answers and errors."""

import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from etude.common.api_keys import (
    ApiKeyFile,
    KeyOwner,
    KeyScope,
    UnauthenticatedError,
    require_scope,
)
from etude.common.errors import ForbiddenError, FullError, InvalidFieldError, UnavailableError
from etude.common.release.channels import ChannelExperiment
from etude.gateway import metrics
from etude.gateway.arms import choose_arm
from etude.gateway.http_exchange import (
    DisconnectedError,
    Headers,
    HttpExchange,
    Receive,
    RequestError,
    Send,
)
from etude.gateway.turn_request import (
    FinishedTurn,
    RolloutMarks,
    TextPiece,
    ToolFormatName,
    TurnEvent,
    TurnRequest,
    TurnStart,
)
from etude.gateway.turns import TurnService
from etude.gateway.wire import fields
from etude.gateway.wire.chat import ChatCompletions
from etude.gateway.wire.completions import TextCompletions
from etude.gateway.wire.messages import Messages
from etude.gateway.wire.protocol import StreamWriter, WireProtocol
from etude.gateway.wire.responses import Responses

log = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
MODELS = "/v1/models"
WIRES: Mapping[str, WireProtocol] = {
    CHAT: ChatCompletions(),
    "/v1/completions": TextCompletions(),
    MESSAGES: Messages(),
    "/v1/responses": Responses(),
}
_PATHS = (*WIRES, COUNT_TOKENS, MODELS)

ROLLOUT, BRANCH, COMPACTION_OF, SIDE, TOOL_FORMAT = (
    b"x-etude-rollout",
    b"x-etude-branch",
    b"x-etude-compaction-of",
    b"x-etude-side",
    b"x-etude-tool-format",
)
"""Headers by which a client marks its requests, and is told where a turn belongs."""
_VERSION = b"x-policy-version"
_MARK = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_GONE = 499
"""Code in metrics of a request whose client went away."""
_STATUSES = {UnauthenticatedError: 401, ForbiddenError: 403, InvalidFieldError: 400}


class _Failure(NamedTuple):
    status: int
    message: str
    headers: Headers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayApp:
    """Serves one route."""

    service: TurnService
    keys: ApiKeyFile
    model: str
    """Name of the served model."""
    find_experiment: Callable[[], ChannelExperiment | None]
    """Asked for each request: which users are assigned to arms now."""
    max_body_bytes: int

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request, by the ASGI protocol."""
        if scope["type"] != "http":
            return
        exchange = HttpExchange(scope, receive, send, self.max_body_bytes)
        request = _ServedRequest(self, exchange)
        await request.answer()
        metrics.REQUESTS.labels(request.arm, str(request.outcome or exchange.status)).inc()
        metrics.REQUEST_SECONDS.labels(request.arm).observe(request.age_s)

    def describe_models(self) -> Mapping[str, object]:
        """Describe the models that clients may name."""
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "etude"}
        return {"object": "list", "data": [model]}


@dataclass(slots=True)
class _ServedRequest:
    """One request while it is served."""

    app: GatewayApp
    exchange: HttpExchange
    arm: str = ""
    stream: StreamWriter | None = None
    has_text: bool = False
    """True once a stream has sent text."""
    outcome: int = 0
    """Status of what went wrong, which a running stream cannot tell in its own; 0: nothing did."""
    started_s: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        """Time since the start of the request."""
        return time.monotonic() - self.started_s

    @property
    def wire(self) -> WireProtocol:
        """Protocol of the request; OpenAI's for a path that has none."""
        path = self.exchange.path
        return WIRES.get(MESSAGES if path == COUNT_TOKENS else path, WIRES[CHAT])

    async def answer(self) -> None:
        """Answer, whatever happens."""
        try:
            await self._route()
        except DisconnectedError:
            self.outcome = _GONE
        except Exception as error:  # noqa: BLE001 - the boundary of the process
            failure = _explain(error)
            self.outcome = failure.status
            with contextlib.suppress(DisconnectedError):
                await self._fail(failure)

    async def _route(self) -> None:
        """Answer by the path.

        Raises:
            RequestError: there is no such path, method or model.
        """
        exchange, app = self.exchange, self.app
        caller = _admit(app.keys, _read_key(exchange))
        if exchange.path not in _PATHS:
            raise RequestError(404, f"no such path; there are {', '.join(_PATHS)}")
        method = "GET" if exchange.path == MODELS else "POST"
        if exchange.scope["method"] != method:
            raise RequestError(405, f"{exchange.path} takes {method}")
        if exchange.path == MODELS:
            await exchange.send_json(200, app.describe_models())
            return
        body = fields.read_body(await exchange.read_body())
        if fields.read_text(body, "model") != app.model:
            raise RequestError(404, f"model: only {app.model!r} is served")
        request = self.wire.read_request(body)
        if exchange.path == COUNT_TOKENS:
            count = await app.service.count_tokens(caller, request)
            await exchange.send_json(200, {"input_tokens": count})
            return
        await self._serve(caller, request)

    async def _serve(self, caller: KeyOwner, request: TurnRequest) -> None:
        app = self.app
        arm = choose_arm(app.find_experiment(), caller.tenant, caller.user)
        self.arm = arm.arm
        if request.stream:
            self.stream = self.wire.open_stream(app.model, request)
        marks = _read_marks(self.exchange)
        turn = app.service.serve(caller, arm, request, marks, self._still_consents)
        async with (
            self.exchange.serve_while_connected(self.wire.keep_alive),
            contextlib.aclosing(turn) as events,
        ):
            async for event in events:
                if self.stream is not None:
                    await self._send_event(self.stream, event)
                elif isinstance(event, FinishedTurn):
                    answer = self.wire.write_answer(app.model, event)
                    version = (_VERSION, event.version.encode())
                    await self.exchange.send_json(200, answer, [*_name_turn(event), version])

    def _still_consents(self) -> bool:
        """Return true if the key's user consents to records now; a key may be taken back too."""
        try:
            return bool(self.app.keys.identify(_read_key(self.exchange)).consent)
        except UnauthenticatedError:
            return False

    async def _send_event(self, stream: StreamWriter, event: TurnEvent) -> None:
        """Send one event of a turn."""
        exchange = self.exchange
        match event:
            case TurnStart():
                await exchange.start_stream(_name_turn(event))
                await exchange.send_part(stream.start(event))
            case TextPiece():
                if not self.has_text:
                    metrics.FIRST_TEXT_SECONDS.labels(self.arm).observe(self.age_s)
                self.has_text = True
                await exchange.send_part(stream.write(event))
            case FinishedTurn():
                await exchange.send_part(stream.finish(event), is_last=True)

    async def _fail(self, failure: _Failure) -> None:
        """Answer with an error; a running stream ends with one."""
        exchange = self.exchange
        if not exchange.status:
            error = self.wire.write_error(failure.status, failure.message)
            await exchange.send_json(failure.status, error, failure.headers)
        elif self.stream is not None:
            end = self.stream.fail(failure.status, failure.message)
            await exchange.send_part(end, is_last=True)


def _admit(keys: ApiKeyFile, key: str) -> KeyOwner:
    """Identify the owner of a key that may be served, and count a request.

    Raises:
        UnauthenticatedError: the key is missing or unknown.
        ForbiddenError: it lacks the scope.
        FullError: its rate is exceeded for now.
    """
    owner = keys.identify(key)
    require_scope(owner, KeyScope.SERVE)
    keys.count(key)
    return owner


def _read_key(exchange: HttpExchange) -> str:
    scheme, _, key = exchange.read_header(b"authorization").partition(" ")
    return key if scheme.lower() == "bearer" else exchange.read_header(b"x-api-key")


def _read_marks(exchange: HttpExchange) -> RolloutMarks:
    """Read the client's marks.

    Raises:
        InvalidFieldError: one is no id.
    """
    marks = [exchange.read_header(name) for name in (ROLLOUT, COMPACTION_OF)]
    for name, mark in zip((ROLLOUT, COMPACTION_OF), marks, strict=True):
        if mark and not _MARK.fullmatch(mark):
            raise InvalidFieldError(name.decode(), "is no id of at most 64 characters")
    side = exchange.read_header(SIDE)
    if side not in {"", "0", "1"}:
        raise InvalidFieldError(SIDE.decode(), "is neither 0 nor 1")
    tool_format = exchange.read_header(TOOL_FORMAT)
    if tool_format not in {"", "Xml", "Native"}:
        raise InvalidFieldError(TOOL_FORMAT.decode(), "is neither Xml nor Native")
    return RolloutMarks(
        rollout=marks[0],
        compaction_of=marks[1],
        tool_format=cast("ToolFormatName", tool_format),
        is_side=side == "1",
    )


def _name_turn(turn: TurnStart | FinishedTurn) -> list[tuple[bytes, bytes]]:
    return [(ROLLOUT, turn.rollout.encode()), (BRANCH, turn.branch.encode())]


def _explain(error: Exception) -> _Failure:
    """Find status and words of an error; those of an unknown one stay in the log."""
    if isinstance(error, RequestError):
        return _Failure(error.status, str(error), [(b"connection", b"close")])
    if isinstance(error, FullError):
        return _Failure(429, str(error), [_retry_after(error.retry_after_s)])
    if isinstance(error, UnavailableError):
        return _Failure(503, str(error), [_retry_after(1.0)])
    for kind, status in _STATUSES.items():
        if isinstance(error, kind):
            return _Failure(status, str(error))
    incident = uuid.uuid4().hex[:12]
    log.error("incident %s", incident, exc_info=error)
    return _Failure(500, f"internal error, see incident {incident} in the log")


def _retry_after(delay_s: float) -> tuple[bytes, bytes]:
    return b"retry-after", b"%d" % max(1, round(delay_s))
