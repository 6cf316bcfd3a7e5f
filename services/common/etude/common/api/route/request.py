"""Request of a person about a route's releases, as an annotation of the route."""

import hashlib
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field

from etude.common.api.meta import Model, Name
from etude.common.api.run.spec import PRINTABLE

ANNOTATION = "etude.dev/release"
"""Holds the newest request, as JSON."""
MAX_LENGTH = 2_048
VERSION = r"^[0-9]{1,9}\.[0-9]{1,15}$"


class RequestedAction(StrEnum):
    """Change that a person asks for."""

    PROPOSE = "Propose"
    PROMOTE = "Promote"
    ROLL_BACK = "Rollback"
    FREEZE = "Freeze"
    UNFREEZE = "Unfreeze"


class RouteRequest(Model):
    """One request."""

    action: RequestedAction
    version: Annotated[str, Field(pattern=VERSION)] | None = None
    """EPOCH.NUMBER of the run; unset for the candidate under test."""
    evaluation: Name | None = None
    """EvalRun whose checkpoint is proposed."""
    without_gate: bool = False
    """Promote a version that passed no gate."""
    reason: Annotated[str, Field(max_length=256)] = ""
    """For people."""
    key: Annotated[str, Field(min_length=1, max_length=64, pattern=PRINTABLE)]
    """Tells it from an earlier request with the same content."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an annotation.

        Raises:
            ValueError: it is no request.
        """
        if len(text) > MAX_LENGTH:
            raise ValueError(f"has more than {MAX_LENGTH} characters")
        return cls.model_validate_json(text)


def identify_request(text: str) -> str:
    """Name of the request in an annotation: 32 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()[:32]
