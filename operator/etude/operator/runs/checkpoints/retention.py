"""Checkpoint retention: the newest verified, the best, and pinned ones stay."""

from collections.abc import Iterator, Sequence, Set

from etude.common.api.kinds import Checkpoint
from etude.common.api.run.checkpointing import Checkpointing, KeepBest
from etude.operator.checkpoints.status import is_ready
from etude.operator.remotes.sanitize import parse_finite

METRIC_KEYS = {"Reward": "reward", "EvalSuccess": "evalSuccess"}
"""Keys of a checkpoint's metrics, by the metric names of the spec."""


def superseded_checkpoints(
    checkpoints: Sequence[Checkpoint],
    checkpointing: Checkpointing,
    named: Set[str] = frozenset(),
) -> Iterator[Checkpoint]:
    """Checkpoints older than the newest verified ones that are kept, and not among the best.

    Pinned, retained and requested checkpoints stay, and so do all while too few are verified.

    Args:
        checkpoints: of the run, newest first; those off its lineage come last.
        checkpointing: how many to keep.
        named: those that runs start from; they stay.
    """
    passing = [c for c in checkpoints if not _is_exempt(c) and c.metadata.name not in named]
    verified = [c for c in passing if is_ready(c)]
    kept = verified[: checkpointing.keep_last]
    if len(kept) < checkpointing.keep_last:
        return
    best = {c.metadata.name for c in best_checkpoints(verified, checkpointing.keep_best)}
    last = kept[-1]
    for checkpoint in passing[passing.index(last) + 1 :]:
        is_same = checkpoint.saved_state.step == last.saved_state.step
        if not is_same and checkpoint.metadata.name not in best:
            yield checkpoint


def best_checkpoints(verified: Sequence[Checkpoint], keep: KeepBest | None) -> list[Checkpoint]:
    """The best checkpoints, best first; of equal ones the earlier, nearer to the evaluation."""
    if keep is None:
        return []
    sign = -1.0 if keep.mode == "Max" else 1.0
    ranked = [
        (sign * value, c.saved_state.step, c)
        for c in verified
        if (value := metric_of(c, keep.metric)) is not None
    ]
    ranked.sort(key=lambda each: each[:2])
    return [c for _, _, c in ranked[: keep.count]]


def metric_of(checkpoint: Checkpoint, metric: str) -> float | None:
    """A metric of the run at the checkpoint's step; None where it has none.

    Its text is untrusted: it comes from a trainer, or from the maker of the object.
    """
    text = checkpoint.saved_state.metrics.get(METRIC_KEYS[metric])
    return None if text is None else parse_finite(text)


def _is_exempt(checkpoint: Checkpoint) -> bool:
    spec = checkpoint.spec
    return spec.pinned or spec.reason == "Manual" or spec.deletion_policy == "Retain"
