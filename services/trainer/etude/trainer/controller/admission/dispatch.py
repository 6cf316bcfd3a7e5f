"""Dispatch of group requests to rollout workers, with retries and validation of results."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from opentelemetry import trace

from etude.agent.chat import ChatFormat
from etude.common import telemetry
from etude.common.errors import InvalidFieldError
from etude.trainer import metrics
from etude.trainer.contents.content_checks import check_content
from etude.trainer.contents.objects import group_prefix
from etude.trainer.contents.rollout_checks import InvalidSpanError, check_rollout
from etude.trainer.controller.admission.content_collector import ContentCollector
from etude.trainer.controller.admission.groups import check_reward
from etude.trainer.controller.checkpoints.recovery import JournaledLedger
from etude.trainer.controller.journal.record_parts import PreparedRecord, prepare_record
from etude.trainer.controller.progress import RunProgress
from etude.trainer.controller.publishing.engines import Engines
from etude.trainer.controller.reporting.reporter import RunReporter
from etude.trainer.rollouts.completion_counts import CompletionCounts
from etude.trainer.rollouts.protocol import (
    GroupRequest,
    GroupResult,
    RolloutWorkers,
    StartCounts,
    WorkerLostError,
)
from etude.trainer.rollouts.sandbox_client import ChangeTooLargeError
from etude.trainer.rollouts.scoring import mask_rollout
from etude.trainer.rollouts.trajectories.resume_counts import Resume, ResumeCounts
from etude.trainer.routing.table import Purpose
from etude.v1 import journal_pb2, rollout_pb2

log = logging.getLogger(__name__)
_TRACER = trace.get_tracer("etude.trainer")

WORKER_RETRIES = 3
"""Retries of a group whose worker died; then the group itself is at fault."""

MAX_ROLLOUT_BYTES = 64 << 20
"""A larger rollout is kept without what training does not read: 8 million tokens are smaller."""

LOOP_BYTES = 1 << 20
"""Records of a group up to this size are read on the event loop, larger ones in a thread: reading
and serialising 24 MB takes about 0.3 s."""

MAX_TRAINED_BYTES = 1 << 30
"""Largest content that training reads; protobuf ends at 2 GiB."""


@dataclass(slots=True, kw_only=True)
class RolloutDispatcher:
    """Runs group requests on the rollout workers, and validates their results."""

    progress: RunProgress
    reporter: RunReporter
    book: JournaledLedger
    workers: RolloutWorkers
    engines: Engines
    chat: ChatFormat | None
    """None in runs that request no rollouts."""
    collector: ContentCollector
    completions: CompletionCounts = field(default_factory=CompletionCounts)
    """Completions that this process was handed."""

    async def run_group(self, order: GroupRequest) -> list[PreparedRecord]:
        """Run a request; each finished rollout has a valid reward or a fault.

        Raises:
            WorkerLostError: worker after worker died.
        """
        metrics.INFLIGHT.labels(kind="rollout").inc(len(order.indices))
        try:
            with _TRACER.start_as_current_span("group") as span:
                span.set_attributes(
                    {
                        "etude.run": self.progress.resolved.uid,
                        "etude.group.id": order.group_id,
                        "etude.task.id": order.task_id,
                    }
                )
                result = await self._run_with_retries(
                    replace(order, trace=telemetry.trace_metadata())
                )
        finally:
            metrics.INFLIGHT.labels(kind="rollout").dec(len(order.indices))
        records = await self._read_records(result.records, order)
        for prepared in records:
            _count_outcome(prepared.record.rollout)
        self.progress.figures.retried += result.retried
        metrics.CONTENT_REPEATS.inc(result.content_repeats)
        _count_lost(result)
        _count_starts(result.starts)
        self._count_completions(result.completions)
        self._count_resumes(result.resumes)
        self.progress.mark_progress()
        self._report_environment(order.environment, result)
        return records

    def write_rollouts(
        self, step: int, split: str, records: Sequence[journal_pb2.JournalRollout]
    ) -> None:
        """Have a worker write rollouts for people; it reads the tokens, and is not waited for."""
        data = [record.SerializeToString() for record in records]
        self.reporter.recorder.write_rollouts(
            f"rollouts {split} of step {step}", self._write_with_retries(step, split, data)
        )

    async def _write_with_retries(self, step: int, split: str, data: Sequence[bytes]) -> None:
        """Have rollouts written, by another worker if the first one dies.

        Raises:
            WorkerLostError: worker after worker died.
        """
        for left in reversed(range(WORKER_RETRIES + 1)):
            try:
                await self.workers.write_rollouts(step, split, data)
            except WorkerLostError as error:
                if not left:
                    raise
                log.warning("rollouts %s of step %d are written again: %s", split, step, error)
            else:
                return

    async def _run_with_retries(self, order: GroupRequest) -> GroupResult:
        for dispatch in range(WORKER_RETRIES):
            try:
                return await self._run_once(order, dispatch)
            except WorkerLostError as error:
                self.reporter.record_event(
                    "WorkerLost", f"{order.group_id} is retried: {error}", warning=True
                )
                self.progress.figures.retried += len(order.indices)
        return await self._run_once(order, WORKER_RETRIES)

    async def _run_once(self, order: GroupRequest, dispatch: int) -> GroupResult:
        request = replace(
            order,
            routing=self.engines.routing_table(),
            epoch=self.progress.epoch,
            dispatch=dispatch,
            is_continued=order.is_continued or dispatch > 0,
        )
        if request.is_continued:
            self.collector.note_repeated(request.group_id)
        return await self.workers.run(request)

    async def _read_records(
        self, records: Sequence[bytes], order: GroupRequest
    ) -> list[PreparedRecord]:
        def read() -> list[PreparedRecord]:
            return [self._read_record(data, order) for data in records]

        return await asyncio.to_thread(read) if sum(map(len, records)) > LOOP_BYTES else read()

    def _read_record(self, data: bytes, order: GroupRequest) -> PreparedRecord:
        record = journal_pb2.JournalRecord()
        record.rollout.SetInParent()
        record.rollout.MergeFromString(data)
        self._check_record(record.rollout, order, num_bytes=len(data))
        return prepare_record(record)

    def _check_record(
        self, record: journal_pb2.JournalRollout, order: GroupRequest, *, num_bytes: int
    ) -> None:
        """Mask a rollout that cannot be trained on; results of workers are untrusted."""
        if num_bytes > MAX_ROLLOUT_BYTES:
            # Never masked for it: a policy that can inflate its record must not escape its reward.
            log.warning("rollout %s is kept without its calls", record.rollout.rollout_id)
            for content in ("calls", "diff", "final_message"):
                record.rollout.ClearField(content)
            num_bytes = record.ByteSize()
        if num_bytes > MAX_TRAINED_BYTES:
            what = f"a record of {num_bytes} bytes; {MAX_TRAINED_BYTES} are the limit"
            record.rollout.ClearField("links")
            mask_rollout(record, what)
        try:
            self._check_tokens(record, order)
            if record.reward.WhichOneof("result") == "reward":
                check_reward(record)
        except InvalidSpanError as error:
            mask_rollout(record, str(error), reason=error.reason)
        except InvalidFieldError as error:
            mask_rollout(record, str(error))

    def _check_tokens(self, record: journal_pb2.JournalRollout, order: GroupRequest) -> None:
        """Check the tokens of a record, or what stands for them; an unsound content is removed.

        Raises:
            InvalidFieldError: naming the field.
        """
        if not record.HasField("content"):
            if record.reward.WhichOneof("result") == "reward":
                self._check_links(record.rollout, order)
            return
        is_evaluation = order.purpose is Purpose.EVALUATION
        try:
            check_content(
                record,
                prefix=group_prefix(order.group_id, of_evaluation=is_evaluation),
                max_tokens=order.limits.context_tokens,
                position_of=self.book.ledger.versions.get,
            )
        except InvalidFieldError:
            record.ClearField("content")
            raise

    def _check_links(self, rollout: rollout_pb2.Rollout, order: GroupRequest) -> None:
        assert self.chat is not None  # noqa: S101 - this run requests rollouts
        check_rollout(
            rollout,
            vocab_size=self.chat.vocab_size,
            max_tokens=order.limits.context_tokens,
            position_of=self.book.ledger.versions.get,
        )

    def _count_completions(self, counts: CompletionCounts) -> None:
        self.completions.merge(counts)
        metrics.COMPLETIONS.labels(interrupted="false").inc(counts.completions - counts.interrupted)
        metrics.COMPLETIONS.labels(interrupted="true").inc(counts.interrupted)
        metrics.INTERRUPTED_LENGTH_RATIO.set(self.completions.interrupted_length_ratio)

    def _count_resumes(self, resumes: ResumeCounts) -> None:
        for kind, count in resumes.counts.items():
            metrics.RESUMES.labels(resume=kind.resume.value, cause=kind.cause.value).inc(count)
        self.progress.figures.resumed.update(
            {
                r.value: self.progress.figures.resumed.get(r.value, 0) + resumes.total(r)
                for r in Resume
            }
        )
        lengths = self.book.ledger.lengths
        lengths.add_redrawn(resumes.lost, resumes.lost_tokens)
        metrics.LOST_LENGTH_RATIO.set(lengths.lost_work_length_ratio)

    def _report_environment(self, pool: str, result: GroupResult) -> None:
        if not result.driver:
            return  # no rollout had an environment
        known = {summary.pool: summary for summary in self.reporter.status.environments}
        summary = known.get(pool) or self.reporter.status.environments.add(pool=pool)
        summary.driver = result.driver
        summary.isolation = result.isolation


def _count_starts(starts: StartCounts) -> None:
    for outcome, count in (
        ("saved", starts.setups),
        ("failed", starts.setups_failed),
        ("lost", starts.setups_lost),
    ):
        metrics.GROUP_SETUPS.labels(outcome=outcome).inc(count)
    for start, count in (
        ("forked", starts.forked),
        ("separate", starts.separate),
        ("unprepared", starts.unprepared),
    ):
        metrics.STARTS.labels(start=start).inc(count)


def _count_outcome(finished: journal_pb2.JournalRollout) -> None:
    reward = finished.reward
    outcome = reward.WhichOneof("result") or "fault"
    is_large = finished.rollout.ending == rollout_pb2.ENDING_CHANGE_TOO_LARGE
    reason = ChangeTooLargeError.reason if is_large else reward.fault.reason
    metrics.ROLLOUTS.labels(state=outcome, reason=reason).inc()


def _count_lost(result: GroupResult) -> None:
    metrics.ENVIRONMENTS.labels(end="recovered").inc(result.recovered)
    metrics.ENVIRONMENTS.labels(end="lost").inc(result.lost - result.recovered)
    metrics.REPLAYED.inc(result.replayed)
