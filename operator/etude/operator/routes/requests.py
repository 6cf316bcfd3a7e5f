"""Requests of people about a route's releases: forwarded once, and answered in the status."""

from typing import NamedTuple

from pydantic import ValidationError

from etude.common.api.kinds import PolicyRoute
from etude.common.api.route.request import ANNOTATION, RouteRequest, identify_request
from etude.common.api.route.status import AnsweredRequest
from etude.operator.remotes.release_order import ReleaseOrder
from etude.operator.remotes.report_store import ReleaseAnswer
from etude.operator.routes.releases import MAX_NAME, MAX_SENTENCE

RESEND_S = 2.0
"""A request without an answer is forwarded again."""


class RequestStep(NamedTuple):
    """The next step with a route's newest request."""

    answered: AnsweredRequest | None
    """For the status."""
    order: ReleaseOrder | None = None
    """Forwards the request; None if nothing is to be forwarded."""


def next_step(route: PolicyRoute, answer: ReleaseAnswer | None, target: str | None) -> RequestStep:
    """Decide about the newest request of a route.

    Args:
        route: with its annotations.
        answer: newest one of the feedback service.
        target: the feedback service; None if it is not ready.
    """
    before, text = route.status.request, route.metadata.annotations.get(ANNOTATION)
    if text is None:
        return RequestStep(before)
    request_id = identify_request(text)
    if before is not None and before.id == request_id:
        return RequestStep(before)
    try:
        request = RouteRequest.parse(text)
    except (ValueError, ValidationError) as error:
        why = f"metadata.annotations: {ANNOTATION} is no request: {error}"[:MAX_SENTENCE]
        return RequestStep(AnsweredRequest(id=request_id, action="Refuse", sentence=why))
    if answer is not None and answer.request_id == request_id:
        decision = answer.decision
        return RequestStep(
            AnsweredRequest(
                id=request_id,
                action=decision.action[:MAX_NAME],
                sentence=decision.sentence[:MAX_SENTENCE],
            )
        )
    if target is None:
        return RequestStep(before)
    order = ReleaseOrder(
        target=target, request_id=request_id, request=request, run_uid=route.status.run_uid
    )
    return RequestStep(before, order)
