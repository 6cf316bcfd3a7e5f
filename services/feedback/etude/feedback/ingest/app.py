"""HTTP interface of the feedback service: events, consents, erasure, export, schemas."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pydantic_core
from pydantic import AwareDatetime, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from etude.common.api_keys import (
    ApiKeyFile,
    KeyOwner,
    KeyScope,
    UnauthenticatedError,
    read_bearer,
    require_scope,
)
from etude.common.errors import (
    EtudeError,
    ForbiddenError,
    FullError,
    InvalidFieldError,
    UnavailableError,
)
from etude.common.feedback.events import (
    MAX_BATCH_BYTES,
    first_problem,
    json_schema,
    split_batch,
)
from etude.common.feedback.payloads import Identifier, WireModel
from etude.common.http_server import RequestLimits
from etude.feedback import metrics
from etude.feedback.ingest.intake import ACKNOWLEDGE_S, EventIntake, check_user
from etude.feedback.ledger.consent import decide_revocation
from etude.feedback.ledger.ledger import StoredEvent
from etude.feedback.ledger.state import UserConsent
from etude.feedback.sessions.task_records import list_tasks

M = TypeVar("M", bound=WireModel)

log = logging.getLogger(__name__)

EVENT_TYPE = "application/cloudevents+json"
BATCH_TYPE = "application/cloudevents-batch+json"
RETRY_AFTER_S = 10
MAX_PAGE = 1_000
"""Events of one answer."""
_STATUS: tuple[tuple[type[EtudeError], int], ...] = (
    (UnauthenticatedError, 401),
    (ForbiddenError, 403),
    (InvalidFieldError, 400),
    (FullError, 429),
    (UnavailableError, 503),
)


class Revocation(WireModel):
    """A user takes the consent back."""

    user: Identifier
    at: AwareDatetime
    """Time of the user's decision."""


class Erasure(WireModel):
    """A user, or a tenant's server for one, asks to be erased."""

    user: Identifier


@dataclass(frozen=True, slots=True)
class FeedbackRoutes:
    """Handlers of all routes."""

    keys: ApiKeyFile
    intake: EventIntake
    reading: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "export"))
    """Reads pages one at a time: they do not take the threads of events that are stored."""

    def routes(self) -> list[Route]:
        return [
            Route("/v1/events", self._publish, methods=["POST"]),
            Route("/v1/events", self._export, methods=["GET"]),
            Route("/v1/revocations", self._revoke, methods=["POST"]),
            Route("/v1/erasures", self._erase, methods=["POST"]),
            Route("/v1/schemas/{kind}", self._schema, methods=["GET"]),
        ]

    async def _publish(self, request: Request) -> Response:
        started_s = time.monotonic()
        key, owner = self._identify(request)
        require_scope(owner, KeyScope.FEEDBACK, KeyScope.USERS)
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        body = await request.body()
        if media_type == BATCH_TYPE:
            items = split_batch(body)
        elif media_type == EVENT_TYPE:
            items = [body]
        else:
            return _error(415, "UnsupportedMediaType", f"use {EVENT_TYPE} or {BATCH_TYPE}")
        self.keys.count(key, len(items))
        answers = await self.intake.take(items, owner)
        metrics.ACKNOWLEDGE_SECONDS.observe(time.monotonic() - started_s)
        if media_type == BATCH_TYPE:
            return JSONResponse({"results": [answer.to_json() for answer in answers]})
        return JSONResponse(answers[0].to_json(), answers[0].status)

    async def _export(self, request: Request) -> Response:
        key, owner = self._identify(request)
        require_scope(owner, KeyScope.EXPORT)
        self.keys.count(key)
        after = _whole_number(request, "after", 0)
        limit = min(max(1, _whole_number(request, "limit", 100)), MAX_PAGE)
        read_page = partial(
            self.intake.ledger.read_page, tenant=owner.tenant, after=after, limit=limit
        )
        page = await asyncio.get_running_loop().run_in_executor(self.reading, read_page)
        if page.num_unreadable:
            metrics.UNREADABLE.inc(page.num_unreadable)
            log.error("left out %d events that do not decrypt", page.num_unreadable)
        following = b"%d" % page.end if page.end > after else b"null"
        events = b",".join(map(_event_json, page.events))
        content = b'{"events":[' + events + b'],"next":' + following + b"}"
        return Response(content, media_type="application/json")

    async def _revoke(self, request: Request) -> Response:
        body = _parse(Revocation, await request.body())
        owner = self._speaker(request, body.user)
        ledger, now_ms = self.intake.ledger, self.intake.clock_ms()
        user = ledger.secret.user_id(owner.tenant, body.user)
        self.intake.require_room()
        at_ms = int(body.at.timestamp() * 1_000)
        decision: UserConsent = decide_revocation(
            ledger.state.consents.get(user), at_ms=at_ms, now_ms=now_ms
        )
        await self.intake.acknowledge(ledger.append_consent(user, decision, now_ms=now_ms))
        return JSONResponse({"user": body.user, "granted": False}, 202)

    async def _erase(self, request: Request) -> Response:
        body = _parse(Erasure, await request.body())
        owner = self._speaker(request, body.user)
        ledger = self.intake.ledger
        user = ledger.secret.user_id(owner.tenant, body.user)
        self.intake.require_room()
        try:
            async with asyncio.timeout(ACKNOWLEDGE_S):
                num_events = await ledger.erase_user(user, now_ms=self.intake.clock_ms())
        except TimeoutError:
            raise UnavailableError("the object store is away: ask again") from None
        metrics.ERASURES.inc()
        tasks = await asyncio.to_thread(lambda: [*list_tasks(ledger.log.store, user)])
        names = [task.task_id for task in tasks]
        return JSONResponse({"user": body.user, "numEvents": num_events, "tasks": names})

    async def _schema(self, request: Request) -> Response:
        return JSONResponse(json_schema(request.path_params["kind"]))

    def _speaker(self, request: Request, user: str) -> KeyOwner:
        """The owner of the key, if it may decide for a user.

        Raises:
            UnauthenticatedError: the key is unknown.
            ForbiddenError: it may not.
        """
        key, owner = self._identify(request)
        problem = "the API key has no tenant" if not owner.tenant else ""
        if KeyScope.ADMIN not in owner.scopes:
            problem = problem or check_user(owner, user)
        if problem:
            raise ForbiddenError(problem)
        self.keys.count(key)
        return owner

    def _identify(self, request: Request) -> tuple[str, KeyOwner]:
        key = read_bearer(request.headers.get("authorization", ""))
        return key, self.keys.identify(key)


def build_application(keys: ApiKeyFile, intake: EventIntake) -> ASGIApp:
    """Build the application of the feedback service."""
    handlers: Mapping[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        EtudeError: _answer_known_error,
        HTTPException: _answer_http_error,
        Exception: _answer_unexpected,
    }
    app = Starlette(routes=FeedbackRoutes(keys, intake).routes(), exception_handlers=handlers)
    return RequestLimits(app, lambda _: MAX_BATCH_BYTES)


def _parse(model: type[M], body: bytes) -> M:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise first_problem(error) from None


def _event_json(event: StoredEvent) -> bytes:
    head = pydantic_core.to_json({"sequence": event.sequence, "receivedMs": event.received_ms})
    return head[:-1] + b',"event":' + event.text + b"}"


def _whole_number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise InvalidFieldError(name, "is not a whole number")
    return int(text)


async def _answer_known_error(request: Request, error: EtudeError) -> Response:
    status = next((number for kind, number in _STATUS if isinstance(error, kind)), None)
    if status is None:
        return await _answer_unexpected(request, error)
    answer = _error(status, error.reason, str(error))
    if isinstance(error, FullError):
        answer.headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif status == 503:
        answer.headers["retry-after"] = str(RETRY_AFTER_S)
    return answer


async def _answer_http_error(_: Request, error: HTTPException) -> Response:
    answer = _error(error.status_code, "HttpError", error.detail)
    if error.status_code in {408, 413}:
        answer.headers["connection"] = "close"
    return answer


async def _answer_unexpected(_: Request, error: Exception) -> Response:
    incident = uuid.uuid4().hex[:12]
    # Only the kind of the error: its text may quote an event.
    log.error("incident %s: %s", incident, type(error).__name__)
    return _error(500, "Internal", f"internal error, see incident {incident} in the log")


def _error(status: int, reason: str, message: str) -> JSONResponse:
    return JSONResponse({"status": status, "reason": reason, "message": message}, status)
