"""What to say about an object that an older schema let through or a newer operator wrote on."""

from typing import TypeVar

from pydantic import ValidationError

from etude.common.api.meta import ObjectMeta
from etude.common.api.status import Status
from etude.operator.acceptance import ACCEPTED
from etude.operator.actions import Moment, Note
from etude.operator.clock import rfc3339
from etude.operator.conditions import conditions, no
from etude.operator.manifests import Manifest
from etude.operator.reasons import Reason

S = TypeVar("S", bound=Status)


def told(manifest: Manifest, kind: type[S], error: ValidationError, now: Moment) -> S | Note:
    """What is wrong with it, in its status; everything else is left as it was said last.

    A run that is over stays over, whatever becomes of its spec: once it can be read again, it must
    not begin again. A status with words of a newer operator is what that one goes by when it is
    back, and stays whole: an Event says so instead.

    Args:
        manifest: the object.
        kind: its kind of status.
        error: what is wrong with it.
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
        f"this operator cannot read status.{trouble}; it leaves the object and all that is the "
        "object's alone. Install the release that wrote it again"
    )
    return Note(
        name="unreadable-status", reason=Reason.INVALID_STATUS, message=message, is_warning=True
    )


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
