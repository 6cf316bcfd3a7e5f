"""What to say about an object that an older schema let through, and that we cannot read."""

from typing import TypeVar

from pydantic import ValidationError

from etude.common.api.meta import ObjectMeta
from etude.common.api.status import Status
from etude.operator.acceptance import ACCEPTED
from etude.operator.actions import Moment
from etude.operator.clock import rfc3339
from etude.operator.conditions import conditions, no
from etude.operator.manifests import Manifest
from etude.operator.reasons import Reason

S = TypeVar("S", bound=Status)


def status(manifest: Manifest, kind: type[S], error: ValidationError, now: Moment) -> S:
    """What is wrong with it; everything else is left as it was said last.

    A run that is over stays over, whatever becomes of its spec: once it can be read again, it must
    not begin again.

    Args:
        manifest: the object.
        kind: its kind of status.
        error: what is wrong with it.
        now: both clocks.
    """
    first = error.errors()[0]
    at = ".".join(str(part) for part in first["loc"])
    known = kind.understood(manifest.get("status", {}))
    before = getattr(known, "conditions", ())
    told = conditions(
        [no(ACCEPTED, Reason.INVALID_SPEC, f"{at}: {first['msg']}")],
        before,
        generation=ObjectMeta.model_validate(manifest["metadata"]).generation,
        now=rfc3339(now.wall_s),
    )
    others = [each for each in before if each.type != ACCEPTED]
    phase = getattr(known, "phase", "") if others else "Pending"
    return known.model_copy(update={"conditions": (*told, *others), "phase": phase})
