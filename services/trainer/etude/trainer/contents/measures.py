"""Counts of the tokens of finished rollouts, which stand for the tokens at the controller. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from etude.common.weights import VersionId
from etude.v1 import journal_pb2, rollout_content_pb2, rollout_pb2


def measure_links(links: Iterable[rollout_pb2.Link]) -> list[rollout_content_pb2.LinkSize]:
    """Count the tokens of links."""
    return [
        rollout_content_pb2.LinkSize(
            tokens=len(link.token_ids),
            sampled=len(link.loss_mask) - link.loss_mask.count(0),
        )
        for link in links
    ]


def measure_uses(links: Iterable[rollout_pb2.Link]) -> list[rollout_content_pb2.VersionUse]:
    """Count the tokens of each pair of versions on each engine, in the order of their first."""
    counts: Counter[tuple[VersionId, VersionId, str]] = Counter()
    for link in links:
        for span in link.spans:
            sampled, context = (
                VersionId.from_proto(span.sampled),
                VersionId.from_proto(span.context),
            )
            counts[sampled, context, span.replica] += span.end - span.start
    return [
        rollout_content_pb2.VersionUse(
            sampled=sampled.to_proto(), context=context.to_proto(), replica=replica, tokens=tokens
        )
        for (sampled, context, replica), tokens in counts.items()
    ]


def link_sizes(record: journal_pb2.JournalRollout) -> Sequence[rollout_content_pb2.LinkSize]:
    """Tokens of each link of a rollout, wherever they are."""
    if record.HasField("content"):
        return record.content.links
    return measure_links(record.rollout.links)


def num_tokens(record: journal_pb2.JournalRollout) -> int:
    """Number of tokens of a rollout, over all its links."""
    return sum(link.tokens for link in link_sizes(record))


def version_uses(record: journal_pb2.JournalRollout) -> Sequence[rollout_content_pb2.VersionUse]:
    """Versions and engines that sampled a rollout."""
    if record.HasField("content"):
        return record.content.uses
    return measure_uses(record.rollout.links)
