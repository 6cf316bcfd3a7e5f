"""Rows of metrics.jsonl and of rollouts/. Pure."""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from etude.common.evaluation.scores import Samples, best_of_k, mean_at_n
from etude.common.weights import VersionId
from etude.common.weights.protocol.manifest import Stats
from etude.trainer.contents.call_figures import call_figures
from etude.trainer.contents.measures import num_tokens
from etude.trainer.controller.reporting.behaviour import (
    behaviour,
    token_sums,
    tool_counts,
    trajectory_figures,
)
from etude.trainer.learner.batches import StepResult
from etude.trainer.rollouts.contents.readable_rows import ending_name
from etude.v1 import journal_pb2

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPosition:
    """Time and position of a row."""

    time_s: float
    phase: str
    step: int
    """Steps done of the phase."""
    global_step: int

    def row(self, kind: str, **fields: Any) -> Row:  # noqa: ANN401 - any JSON value
        return {
            "kind": kind,
            "time_s": round(self.time_s, 3),
            "phase": self.phase,
            "step": self.step,
            "global_step": self.global_step,
            **fields,
        }


MODEL_FIGURES = (
    "mtp_loss",
    "mtp_kl",
    "mtp_agreement",
    "expert_load_ratio",
    "expert_load_ratio_worst",
    "expert_load_entropy",
    "expert_load_entropy_worst",
)
"""Figures of steps that train a head of multi-token prediction, or a mixture of experts."""


def step_row(place: RowPosition, result: StepResult, *, seconds: float) -> Row:
    """One optimiser step of any phase."""
    return place.row(
        "step",
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=result.learning_rate,
        seconds=round(seconds, 4),
        tokens=result.tokens,
        trained_tokens=result.trained_tokens,
        tokens_per_second=round(result.tokens / max(seconds, 1e-9), 1),
        weight_digest=result.weight_digest,
        learner_tokens_per_second=round(result.tokens / max(result.seconds, 1e-9), 1),
        **({} if result.mfu is None else {"mfu": round(result.mfu, 4)}),
        **({"skipped": True} if result.is_skipped else {}),
        **{name: round(result.extra[name], 6) for name in MODEL_FIGURES if name in result.extra},
    )


class PublishedVersion(NamedTuple):
    """Size and statistics of a published version."""

    manifest_sha256: str
    size_bytes: int
    stats: Stats
    is_complete: bool
    """True if it needs no earlier version."""

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return self.stats.changed / max(1, self.stats.elements)

    @property
    def bits_per_change(self) -> float:
        """Stored bits per changed element."""
        return 8 * self.size_bytes / max(1, self.stats.changed)


def version_row(
    place: RowPosition, version: VersionId, seconds: float, published: PublishedVersion
) -> Row:
    """One published policy version."""
    return place.row(
        "version",
        epoch=version.epoch,
        number=version.number,
        seconds=round(seconds, 4),
        bytes=published.size_bytes,
        complete=published.is_complete,
        changed=published.stats.changed,
        density=round(published.density, 6),
        bits_per_change=round(published.bits_per_change, 2),
    )


def held_out_row(place: RowPosition, losses: Mapping[str, float]) -> Row:
    """Held-out losses of a supervised phase, by dataset."""
    return place.row("held_out", losses={name: round(loss, 6) for name, loss in losses.items()})


class StepFaults(NamedTuple):
    """Rollouts that platform faults cost a step."""

    masked: int
    retried: int
    dropped: int
    resumed: Mapping[str, int] = MappingProxyType({})
    """Rollouts by how they went on after a loss, of the run so far."""
    lost_work_length_ratio: float = 0.0


def policy_fields(
    result: StepResult,
    records: Sequence[journal_pb2.JournalRollout],
    *,
    staleness: Sequence[int],
    faults: StepFaults,
) -> Row:
    """Fields of a policy step's row beyond those of a supervised one."""
    rollouts, calls = [record.rollout for record in records], list(map(call_figures, records))
    return {
        "reward_mean": mean(record.reward.reward for record in records),
        "success_mean": mean(record.reward.success for record in records),
        "entropy": result.entropy,
        "clip_fraction": result.clip_fraction,
        "mismatch_mean": result.mismatch_mean,
        "mismatch_max": result.mismatch_max,
        "mismatch_current": result.mismatch_current,
        "mismatch_current_tokens": result.current_tokens,
        "staleness_p50": statistics.median(staleness) if staleness else 0,
        "staleness_max": max(staleness, default=0),
        "rollouts": len(rollouts) + faults.masked,
        "masked": faults.masked,
        "retried": faults.retried,
        "dropped": faults.dropped,
        "resumed": dict(faults.resumed),
        "lost_work_length_ratio": round(faults.lost_work_length_ratio, 4),
        "malformed_per_rollout": mean(r.costs.malformed_calls for r in rollouts),
        "turns_mean": mean(r.costs.turns for r in rollouts),
        "length_mean": mean(num_tokens(record) for record in records),
        "sampled_tokens": sum(r.costs.completion_tokens for r in rollouts),
        **{f"{kind}_tokens": n for kind, n in token_sums(r.costs for r in rollouts).items()},
        **trajectory_figures(calls),
        "endings": dict(Counter(ending_name(r) for r in rollouts)),
        "tools": tool_counts(calls),
        "groups_active": _count_active(records),
        "update_seconds": round(result.seconds, 3),
        "extra": dict(result.extra),
    }


def step_figures(records: Sequence[journal_pb2.JournalRollout]) -> dict[str, float]:
    """Figures for a success policy, by their names in the spec."""
    return {
        "Reward": mean(record.reward.reward for record in records),
        "Success": mean(record.reward.success for record in records),
    }


def evaluation_fields(
    name: str,
    *,
    sampled: Sequence[journal_pb2.JournalRollout],
    greedy: Sequence[journal_pb2.JournalRollout],
) -> Row:
    """Fields of an evaluation: success, and behaviour in both modes.

    Args:
        name: of the evaluation.
        sampled: at least one; of a task with several samples the mean counts.
        greedy: none without a greedy pass.
    """
    row: Row = {
        "name": name,
        "count": len(sampled),
        "success": mean_at_n(_successes(sampled)),
        "reward_mean": mean(record.reward.reward for record in sampled),
        "length_mean": mean(num_tokens(record) for record in sampled),
        "turns_mean": mean(record.rollout.costs.turns for record in sampled),
        "behaviour": {"sampled": asdict(behaviour(list(map(call_figures, sampled))))},
    }
    if not any(num_tokens(record) for record in sampled):
        del row["length_mean"]
    if best := _best_successes(_successes(sampled)):
        row["best_of"] = best
    if greedy:
        row["greedy_success"] = mean(record.reward.success for record in greedy)
        row["behaviour"]["greedy"] = asdict(behaviour(list(map(call_figures, greedy))))
    return row


def _successes(records: Iterable[journal_pb2.JournalRollout]) -> dict[str, list[float]]:
    """Success of the samples of each task."""
    found: dict[str, list[float]] = {}
    for record in records:
        found.setdefault(record.rollout.task_id, []).append(float(record.reward.success))
    return found


def _best_successes(samples: Samples) -> dict[str, float]:
    """Best-of-K for K = 2, 4, 8 and so on, up to the number of samples that every task has."""
    least = min(map(len, samples.values()))
    powers = itertools.takewhile(lambda k: k <= least, (2**n for n in itertools.count(1)))
    return {str(k): best_of_k(samples, k=k) for k in powers}


def mean(values: Iterable[float]) -> float:
    """Mean; 0 if empty."""
    listed = [float(value) for value in values]
    return sum(listed) / len(listed) if listed else 0.0


def _count_active(records: Sequence[journal_pb2.JournalRollout]) -> int:
    """Count the groups whose rewards differ: the others have no gradient."""
    rewards: dict[str, set[float]] = {}
    for record in records:
        rewards.setdefault(record.rollout.group_id, set()).add(record.reward.reward)
    return sum(len(found) > 1 for found in rewards.values())
