"""Requests of people about a route's releases: forwarded once, and answered in the status."""

from dataclasses import replace
from typing import NamedTuple

from pydantic import ValidationError

from etude.common.api.kinds import PolicyRoute
from etude.common.api.route.request import (
    ANNOTATION,
    RequestedAction,
    RouteRequest,
    identify_request,
)
from etude.common.api.route.status import AnsweredRequest
from etude.operator.remotes.release_order import ReleaseOrder
from etude.operator.routes.proposals import ReleaseInputs, propose_evaluation
from etude.operator.routes.releases import MAX_NAME, MAX_SENTENCE

RESEND_S = 2.0
"""A request without an answer is forwarded again."""


class RequestStep(NamedTuple):
    """The next step with a route's newest request."""

    answered: AnsweredRequest | None
    """For the status."""
    order: ReleaseOrder | None = None
    """Forwards the request; None if nothing is to be forwarded."""


def next_step(route: PolicyRoute, inputs: ReleaseInputs) -> RequestStep:
    """Decide about the newest request of a route, which its annotations have."""
    before, text = route.status.request, route.metadata.annotations.get(ANNOTATION)
    if text is None or (before is not None and before.id == identify_request(text)):
        return RequestStep(before)
    request_id = identify_request(text)
    try:
        request = RouteRequest.parse(text)
    except (ValueError, ValidationError) as error:
        why = f"metadata.annotations: {ANNOTATION} is no request: {error}"
        return RequestStep(_answer(request_id, "Refuse", why))
    answer = inputs.answer
    if answer is not None and answer.request_id == request_id:
        return RequestStep(_answer(request_id, answer.decision.action, answer.decision.sentence))
    is_proposal = request.action is RequestedAction.PROPOSE
    if inputs.target is None or (is_proposal and inputs.report is None):
        return RequestStep(before)
    order = _order(route, request, request_id, inputs)
    if isinstance(order, str):
        return RequestStep(_answer(request_id, "Refuse", order))
    return RequestStep(before, order)


def _answer(request_id: str, action: str, sentence: str) -> AnsweredRequest:
    return AnsweredRequest(
        id=request_id, action=action[:MAX_NAME], sentence=sentence[:MAX_SENTENCE]
    )


def _order(
    route: PolicyRoute, request: RouteRequest, request_id: str, inputs: ReleaseInputs
) -> ReleaseOrder | str:
    """The order that forwards a request, or the reason that forbids it."""
    assert inputs.target is not None, "checked before"  # noqa: S101 - our own mistake
    if request.action is not RequestedAction.PROPOSE:
        return ReleaseOrder(
            target=inputs.target,
            request_id=request_id,
            request=request,
            run_uid=route.status.run_uid,
        )
    evaluation = inputs.evaluations.get(request.evaluation or "")
    if evaluation is None:
        return f"no EvalRun {request.evaluation or ''} in this namespace whose spec is valid"
    found = propose_evaluation(route, evaluation, inputs)
    if isinstance(found, str):
        return found
    return replace(found, request_id=request_id, request=request, asked_by="kubectl")
