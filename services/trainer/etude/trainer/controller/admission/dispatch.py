"""Dispatch of group requests to rollout workers, with retries and validation of results."""

import logging
from dataclasses import replace

from opentelemetry import trace

from etude.common import telemetry
from etude.common.errors import InvalidFieldError
from etude.trainer import metrics
from etude.trainer.controller.admission.groups import check_reward, check_rollout
from etude.trainer.controller.admission.rollout_checks import InvalidSpanError
from etude.trainer.controller.journal.segments import MAX_RECORD_BYTES
from etude.trainer.controller.run import Run
from etude.trainer.rollouts.protocol import GroupRequest, GroupResult, WorkerLostError
from etude.v1 import journal_pb2, rewards_pb2, rollout_pb2

log = logging.getLogger(__name__)
_TRACER = trace.get_tracer("etude.trainer")

WORKER_RETRIES = 3
"""Retries of a group whose worker died; then the group itself is at fault."""

MAX_ROLLOUT_BYTES = MAX_RECORD_BYTES - (1 << 10)
"""Largest rollout in the journal; the rest of a record is its frame."""


async def run_group(run: Run, order: GroupRequest) -> list[journal_pb2.JournalRollout]:
    """Run a request; each finished rollout has a valid reward or a fault.

    Raises:
        WorkerLostError: worker after worker died.
    """
    metrics.INFLIGHT.labels(kind="rollout").inc(len(order.indices))
    try:
        with _TRACER.start_as_current_span("group") as span:
            span.set_attributes(
                {
                    "etude.run": run.resolved.uid,
                    "etude.group.id": order.group_id,
                    "etude.task.id": order.task_id,
                }
            )
            result = await _run_with_retries(run, replace(order, trace=telemetry.trace_metadata()))
    finally:
        metrics.INFLIGHT.labels(kind="rollout").dec(len(order.indices))
    records = [journal_pb2.JournalRollout.FromString(data) for data in result.records]
    for record in records:
        _check_record(run, record, order)
        outcome = record.reward.WhichOneof("result") or "fault"
        metrics.ROLLOUTS.labels(state=outcome, reason=record.reward.fault.reason).inc()
    run.figures.retried += result.retried
    _count_lost(result)
    run.mark_progress()
    _report_environment(run, order.environment, result)
    return records


async def _run_with_retries(run: Run, order: GroupRequest) -> GroupResult:
    for _ in range(WORKER_RETRIES):
        try:
            return await run.rollouts.run(order)
        except WorkerLostError as error:
            run.record_event("WorkerLost", f"{order.group_id} is retried: {error}", warning=True)
            run.figures.retried += len(order.indices)
    return await run.rollouts.run(order)


def _check_record(run: Run, record: journal_pb2.JournalRollout, order: GroupRequest) -> None:
    """Mask a rollout that cannot be trained on; results of workers are untrusted."""
    if record.ByteSize() > MAX_ROLLOUT_BYTES:
        what = f"a record of {record.ByteSize()} bytes; the journal takes {MAX_ROLLOUT_BYTES}"
        for content in ("links", "calls", "diff", "final_message"):
            record.rollout.ClearField(content)
        mask_rollout(record, what)
    if record.reward.WhichOneof("result") != "reward":
        return
    try:
        check_reward(record)
        check_rollout(
            record.rollout,
            vocab_size=run.chat.vocab_size,
            max_tokens=order.limits.max_tokens,
            position_of=run.book.ledger.versions.get,
        )
    except InvalidSpanError as error:
        mask_rollout(record, str(error), reason=error.reason)
    except InvalidFieldError as error:
        mask_rollout(record, str(error))


def mask_rollout(
    record: journal_pb2.JournalRollout, what: str, *, reason: str = "InvalidRollout"
) -> None:
    """Mask a rollout with a platform fault."""
    log.error("rollout %s is unusable: %s", record.rollout.rollout_id, what)
    record.rollout.ending = rollout_pb2.ENDING_PLATFORM_FAULT
    record.rollout.fault = what
    fault = rewards_pb2.RewardFault(reason=reason, message=what)
    record.reward.fault.CopyFrom(fault)


def _count_lost(result: GroupResult) -> None:
    metrics.ENVIRONMENTS.labels(end="recovered").inc(result.recovered)
    metrics.ENVIRONMENTS.labels(end="lost").inc(result.lost - result.recovered)
    metrics.REPLAYED.inc(result.replayed)


def _report_environment(run: Run, pool: str, result: GroupResult) -> None:
    if not result.driver:
        return  # no rollout had an environment
    known = {summary.pool: summary for summary in run.reports.status.environments}
    summary = known.get(pool) or run.reports.status.environments.add(pool=pool)
    summary.driver = result.driver
    summary.isolation = result.isolation
