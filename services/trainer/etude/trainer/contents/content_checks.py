"""Validation of what stands for the tokens of a rollout at the controller. Pure."""

from collections.abc import Sequence

from etude.common.blobs.store import checked_key
from etude.common.errors import InvalidFieldError
from etude.common.weights import VersionId
from etude.trainer.contents.objects import DIGEST_BYTES, MAX_CONTENT_BYTES
from etude.trainer.contents.rollout_checks import InvalidSpanError, PositionOf
from etude.v1 import journal_pb2, rollout_content_pb2

MAX_LINKS = 16_384
MAX_TOOLS = 1_024
MAX_CALLS = 10_000_000
MAX_USES = 4_096
"""Versions and engines of one rollout: its 1,024 turns, with a summary after each, and the swaps
between 64 versions are 2,112 at most; the rest is for completions that went on elsewhere."""
PARTS = {
    "errors": "calls",
    "turns": "calls",
    "edits": "calls",
    "looks_before_edit": "calls",
    "failed_edits": "edits",
}
"""Counts that are not above others."""
COUNTS = (
    "calls",
    "errors",
    "turns",
    "malformed",
    "edits",
    "failed_edits",
    "changes",
    "looks_before_edit",
)


def check_content(
    record: journal_pb2.JournalRollout, *, prefix: str, max_tokens: int, position_of: PositionOf
) -> None:
    """Refuse a content that cannot be what a worker stored of a finished rollout.

    Args:
        record: as a worker handed it over.
        prefix: of the keys of its group.
        max_tokens: most that one link may have.
        position_of: position of a version along the accepted chain.

    Raises:
        InvalidSpanError: the versions of its tokens are impossible.
        InvalidFieldError: another field is invalid; it is named.
    """
    content = record.content
    if record.rollout.links:
        raise InvalidFieldError("links", "are in the record and in the store")
    _check_object(content.tokens, "content.tokens", prefix)
    if content.HasField("calls"):
        _check_object(content.calls, "content.calls", prefix)
    _check_figures(content.figures)
    sampled = _check_sizes(content.links, max_tokens)
    _check_uses(record, sampled, position_of)


def _check_object(reference: rollout_content_pb2.ContentObject, where: str, prefix: str) -> None:
    try:
        checked_key(reference.key)
    except InvalidFieldError as error:
        raise InvalidFieldError(f"{where}.key", str(error)) from error
    if not reference.key.startswith(prefix):
        raise InvalidFieldError(f"{where}.key", f"is not below {prefix}")
    if not 0 < reference.num_bytes <= MAX_CONTENT_BYTES:
        found = f"{reference.num_bytes} is not 1 to {MAX_CONTENT_BYTES}"
        raise InvalidFieldError(f"{where}.num_bytes", found)
    if len(reference.digest) != DIGEST_BYTES:
        found = f"{len(reference.digest)} bytes, not {DIGEST_BYTES}"
        raise InvalidFieldError(f"{where}.digest", found)


def _check_figures(figures: rollout_content_pb2.CallFigures) -> None:
    """Check that counts are counts, and that they agree.

    Raises:
        InvalidFieldError: naming the first that is impossible.
    """
    if len(figures.tools) > MAX_TOOLS:
        found = f"{len(figures.tools)} names; {MAX_TOOLS} are the limit"
        raise InvalidFieldError("content.figures.tools", found)
    for name in COUNTS:
        count = int(getattr(figures, name))
        if not 0 <= count <= MAX_CALLS:
            raise InvalidFieldError(f"content.figures.{name}", f"{count} is not 0 to {MAX_CALLS}")
    if min(figures.tools.values(), default=0) < 0:
        raise InvalidFieldError("content.figures.tools", "a count is negative")
    if sum(figures.tools.values()) != figures.calls:
        raise InvalidFieldError("content.figures.tools", f"are not the {figures.calls} calls")
    for part, whole in PARTS.items():
        count, total = int(getattr(figures, part)), int(getattr(figures, whole))
        if count > total:
            raise InvalidFieldError(f"content.figures.{part}", f"{count} of {total} {whole}")


def _check_sizes(links: Sequence[rollout_content_pb2.LinkSize], max_tokens: int) -> int:
    """Check the sizes of links; return the number of sampled tokens.

    Raises:
        InvalidFieldError: naming the first link that is impossible.
    """
    if not 0 < len(links) <= MAX_LINKS:
        raise InvalidFieldError("content.links", f"{len(links)} links, not 1 to {MAX_LINKS}")
    for place, link in enumerate(links):
        if not 0 < link.tokens <= max_tokens:
            found = f"{link.tokens} tokens, not 1 to {max_tokens}"
            raise InvalidFieldError(f"content.links[{place}].tokens", found)
        if not 0 <= link.sampled < link.tokens:
            found = f"{link.sampled} of {link.tokens} tokens"
            raise InvalidFieldError(f"content.links[{place}].sampled", found)
    return sum(link.sampled for link in links)


def _check_uses(record: journal_pb2.JournalRollout, sampled: int, position_of: PositionOf) -> None:
    uses = record.content.uses
    if len(uses) > MAX_USES:
        raise InvalidSpanError("content.uses", f"{len(uses)}; {MAX_USES} are the limit")
    oldest = VersionId.from_proto(record.rollout.oldest)
    for place, use in enumerate(uses):
        _check_use(use, f"content.uses[{place}]", oldest, position_of)
    if sum(use.tokens for use in uses) != sampled:
        raise InvalidSpanError("content.uses", f"do not cover the {sampled} sampled tokens")
    if position_of(oldest) is None:
        raise InvalidSpanError("oldest", "names a version that was never published")


def _check_use(
    use: rollout_content_pb2.VersionUse, where: str, oldest: VersionId, position_of: PositionOf
) -> None:
    if use.tokens <= 0:
        raise InvalidSpanError(where, f"{use.tokens} tokens")
    sampled, context = VersionId.from_proto(use.sampled), VersionId.from_proto(use.context)
    for version in (sampled, context):
        if position_of(version) is None:
            raise InvalidSpanError(where, f"version {version} was never published")
    if context.number > sampled.number:
        raise InvalidSpanError(where, f"context {context} is newer than the weights {sampled}")
    if context.number < oldest.number:
        raise InvalidSpanError("oldest", f"{where} has a context before it")
