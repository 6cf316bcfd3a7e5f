"""Policy spans of a completion, from the engine's weight labels."""

from collections.abc import Sequence

from etude.common.weights import VersionId
from etude.inference.policy import LabelSpan
from etude.v1 import weights_pb2


def policy_spans(
    labels: Sequence[LabelSpan],
    *,
    admitted: VersionId,
    num_tokens: int,
    recomputes: bool = False,
    replica: str = "",
) -> list[weights_pb2.PolicySpan]:
    """Spans of one completion: adjacent, non-empty, covering [0, num_tokens).

    A request shares cached prefixes only with requests admitted under the same version, so that
    version is the oldest whose KV entries its tokens can have attended to.

    Args:
        labels: the engine's, in token order.
        admitted: version that was live when the request entered the engine.
        num_tokens: tokens of the completion.
        recomputes: whether every swap makes all requests recompute their KV entries.
        replica: the engine process that sampled them.

    Raises:
        ValueError: the labels have a gap, or one is not a version.
    """
    spans = []
    position = 0
    oldest = admitted
    for label in labels:
        if label.start != position or label.end <= label.start:
            raise ValueError(f"labels {list(labels)} do not cover the completion without gaps")
        position = label.end
        sampled = VersionId.parse(label.label)
        # After a roll-back the sampled version may be the oldest so far, and its entries stay.
        oldest = sampled if recomputes else min(oldest, sampled, key=lambda each: each.number)
        spans.append(
            weights_pb2.PolicySpan(
                sampled=sampled.to_proto(),
                context=oldest.to_proto(),
                start=label.start,
                end=label.end,
                replica=replica,
            )
        )
    if position != num_tokens:
        raise ValueError(f"labels {list(labels)} do not cover {num_tokens} tokens")
    return spans
