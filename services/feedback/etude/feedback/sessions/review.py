"""Review of sessions: a file in YAML that lists candidates for tasks, for a person to edit."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.common.errors import Problem, UserError
from etude.common.redact.redactor import Redactor

MAX_REQUEST_CHARS = 400
MAX_REVIEW_BYTES = 32 << 20
MAX_TEXT_CHARS = 1 << 20
"""Of one text of a session."""
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
_HEAD = """\
# Sessions of users that may become tasks. Read each one, correct it, and set `accepted: true`.
# A task needs: a request of at most 400 characters, the full name of the commit that the session
# began with, a reference that solves it, and hidden tests that fail before it and pass after it.
# This file holds what users wrote: keep it as private as they expect, and delete it afterwards.
"""

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]


class SessionEntry(BaseModel):
    """One session, as far as its user lets it be read."""

    model_config = _STRICT

    session: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Rollout, as `turn_log.identify_rollout` names it."""
    accepted: bool = False
    refusals: list[str] = []
    """Reasons for which it is no task as it stands."""
    request: Text
    commit: Annotated[str, Field(max_length=64)] = ""
    """State of the repository at the start; the service has no repository, and cannot know it."""
    reference: Text
    """Patch that solves it, without the tests."""
    tests: Text
    """Patch that adds the hidden tests."""
    answer: Text = ""
    """For judges of quality."""
    user: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Pseudonym, under which consent and erasure are asked again."""
    started_ms: Annotated[int, Field(ge=0)]


class RefusedSession(BaseModel):
    """A session without a text: its user does not let it be read, or nothing of it was kept."""

    model_config = _STRICT

    session: str
    refusals: list[str]


class SessionReview(BaseModel):
    """All of a review."""

    model_config = _STRICT

    format: Literal[1] = 1
    tenant: Annotated[str, Field(min_length=1, max_length=128)]
    terms: Annotated[list[str], Field(min_length=1)]
    """Versions of the terms that allow tasks of sessions."""
    sessions: list[SessionEntry]
    refused: list[RefusedSession] = []


def find_refusals(entry: SessionEntry, redactor: Redactor) -> list[str]:
    """Reasons for which the texts of an entry are no task."""
    return list(_find_refusals(entry, redactor))


def _find_refusals(entry: SessionEntry, redactor: Redactor) -> Iterator[str]:
    if not entry.request.strip():
        yield "NoRequest"
    if len(entry.request.strip()) > MAX_REQUEST_CHARS:
        yield "RequestTooLong"
    if not entry.reference.strip():
        yield "NoReference"
    if not entry.tests.strip():
        yield "NoTests"
    texts = (entry.request, entry.reference, entry.tests, entry.answer)
    if any("⟦" in text or redactor.find(text.encode()) for text in texts):
        yield "SecretsFound"


def write_review(path: Path, review: SessionReview) -> None:
    """Write a new file that only its owner reads.

    Raises:
        UserError: it exists, and a review with work of a person is never replaced; or it is larger
            than what is read.
        OSError: it cannot be written.
    """
    text = yaml.dump(
        review.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    data = (_HEAD + text).encode()
    if len(data) > MAX_REVIEW_BYTES:
        what = f"would have {len(data)} bytes, and {MAX_REVIEW_BYTES} are read"
        raise UserError(Problem("TooLarge", what, str(path), "list fewer sessions: --limit"))
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        fix = "write its tasks with --repo and --out, or name another file"
        raise UserError(Problem("Conflict", "exists already", str(path), fix)) from None
    with os.fdopen(file, "wb") as out:
        out.write(data)


def read_review(path: Path) -> SessionReview:
    """Read a review.

    Raises:
        UserError: it is missing, or no review.
    """
    fix = "correct it, or list the sessions again into another file"
    try:
        return SessionReview.model_validate(_load_yaml(path))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part)[:64] for part in first["loc"])
        problem = Problem("InvalidReview", f"{where}: {first['msg']}", str(path), fix)
        raise UserError(problem) from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        what = str(error).splitlines()[0]
        raise UserError(Problem("InvalidReview", what, str(path), fix)) from error


def _load_yaml(path: Path) -> object:
    """Load a document of bounded size.

    Raises:
        ValueError: it is larger.
    """
    with path.open("rb") as file:
        data = file.read(MAX_REVIEW_BYTES + 1)
    if len(data) > MAX_REVIEW_BYTES:
        raise ValueError(f"has more than {MAX_REVIEW_BYTES} bytes")
    return yaml.safe_load(data)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that people can edit them."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> Any:  # noqa: ANN401 - PyYAML's node
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
