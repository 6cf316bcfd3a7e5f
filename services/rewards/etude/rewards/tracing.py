"""Trace spans of rewards, in the rollouts' own traces."""

from opentelemetry import trace
from opentelemetry.context import Context

from etude.rewards.faults import Fault
from etude.rewards.rubric import RewardValue
from etude.v1 import rollout_pb2

tracer = trace.get_tracer("etude.rewards")


def reward(rollout: rollout_pb2.Rollout, outcome: RewardValue | Fault) -> None:
    """Add an outcome to the rollout's trace; a rollout without a trace gets none."""
    parent = _context(rollout.trace_id, rollout.span_id)
    if parent is None:
        return
    attributes: dict[str, str | float] = {"etude.rollout.id": rollout.rollout_id}
    if isinstance(outcome, Fault):
        attributes["etude.reward.fault"] = outcome.reason
    else:
        attributes |= {"etude.reward": outcome.reward, "etude.reward.success": outcome.success}
        attributes |= {f"etude.reward.part.{part.name}": part.value for part in outcome.parts}
    tracer.start_span("reward", context=parent, attributes=attributes).end()


def _context(trace_id: str, span_id: str) -> Context | None:
    try:
        numbers = int(trace_id, 16), int(span_id, 16)
    except ValueError:
        return None
    parent = trace.SpanContext(
        trace_id=numbers[0],
        span_id=numbers[1],
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent)) if parent.is_valid else None
