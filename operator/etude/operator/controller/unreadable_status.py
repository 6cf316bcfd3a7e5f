"""Status of an object that does not parse: of an older schema, or written by a newer operator."""

from typing import TypeVar

from pydantic import ValidationError

from etude.common.api.meta import ObjectMeta
from etude.common.api.run.status import Status
from etude.operator.actions import Moment, Note
from etude.operator.clock import rfc3339
from etude.operator.conditions import ACCEPTED, conditions, no
from etude.operator.manifests import Manifest
from etude.operator.reasons import Reason

S = TypeVar("S", bound=Status)


def told(manifest: Manifest, kind: type[S], error: ValidationError, now: Moment) -> S | Note:
    """The status with the validation error under Accepted; all other fields stay.

    A finished run stays finished although its spec is unreadable: it must not start again once it
    can be read. A status with fields of a newer operator stays untouched for that operator; an
    Event reports it instead.

    Args:
        manifest: the object.
        kind: class of its status.
        error: the validation error of the object.
        now: both clocks.
    """
    try:
        known = kind.understood(manifest.get("status", {}))
    except ValidationError as of_status:
        return _of_a_newer_operator(_first(of_status))
    before = getattr(known, "conditions", ())
    facts = conditions(
        [no(ACCEPTED, Reason.INVALID_SPEC, _first(error))],
        before,
        generation=ObjectMeta.model_validate(manifest["metadata"]).generation,
        now=rfc3339(now.wall_s),
    )
    others = [each for each in before if each.type != ACCEPTED]
    phase = getattr(known, "phase", "") if others else "Pending"
    return known.model_copy(update={"conditions": (*facts, *others), "phase": phase})


def _of_a_newer_operator(trouble: str) -> Note:
    message = (
        f"this operator cannot read status.{trouble}; it leaves the object and its children"
        " unchanged. Install the release that wrote the status"
    )
    return Note(
        name="unreadable-status", reason=Reason.INVALID_STATUS, message=message, is_warning=True
    )


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
