"""Compaction monitor: runs the compactor's rounds in the background, and keeps its last report."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from etude.common.errors import FencedError
from etude.common.weights import EpochRecord
from etude.trainer import metrics
from etude.trainer.compactor.report import CompactorClient, CompactorReport, describe_overdue

log = logging.getLogger(__name__)

KEYFRAME_OVERDUE = "KeyframeOverdue"
"""Reason of condition Degraded: joining engines take longer and longer to catch up."""

TICK_S = 1.0
"""Interval of checks for a new version."""

REST_S = 10.0
"""Pause after a round with failures."""

IDLE_S = 60.0
"""Longest time between two rounds, so that released versions are deleted in any case."""


@dataclass(slots=True, kw_only=True)
class CompactionMonitor:
    """Runs a compactor, and keeps its last report."""

    client: CompactorClient
    epoch: int
    versions: int
    """Between two keyframes, as the run has it."""
    first: int
    """Number of the first version of this epoch."""
    last: CompactorReport | None = None
    problem: str = ""
    """Error of the last round, if it gave no report."""
    _repaired_number: int | None = None
    """Number of the newest version that was complete because the chain was broken."""

    async def run(self, newest: Callable[[], int]) -> None:
        """Run rounds while the epoch is open; raise none of their errors."""
        seen, rested_s, closed = -1, 0.0, 0
        while True:
            number, epoch = newest(), self.epoch
            pause_s = TICK_S
            if epoch != closed and (number != seen or rested_s >= IDLE_S):
                seen, rested_s = number, 0.0
                try:
                    is_well = await self.run_round()
                except FencedError as error:
                    log.info("the compactor stops until this controller opens an epoch: %s", error)
                    closed, seen, is_well = epoch, -1, True
                if not is_well:
                    seen, pause_s = -1, REST_S
            await asyncio.sleep(pause_s)
            rested_s += pause_s

    def begin_epoch(self, record: EpochRecord) -> None:
        """Continue in an epoch that this controller opened."""
        self.epoch, self.first = record.epoch, record.first_number

    async def run_round(self) -> bool:
        """Run one round; False if anything failed in it.

        Raises:
            FencedError: a newer epoch was opened.
        """
        try:
            report = await self.client.run_round(self.epoch)
        except FencedError:
            raise
        except Exception as error:
            log.warning("the compactor failed", exc_info=error)
            metrics.COMPACTOR_FAILURES.labels(stage="round").inc()
            self.problem = f"{type(error).__name__}: {str(error)[:512]}"
            return False
        self.problem, self.last = "", report
        _count(report)
        return not report.failures

    def chain_break(self) -> str:
        """Describe a break in the chain that only a complete version can repair; empty without one.

        A complete version that did not help is not followed by another one before a keyframe would
        be due: then the fault is not in the store.
        """
        last = self.last
        if last is None or last.cut_off_at is None:
            return ""
        if (
            self._repaired_number is not None
            and last.cut_off_at.number < self._repaired_number + self.versions
        ):
            return ""
        return "; ".join(each.message for each in last.failures if each.stage == "follow")

    def note_complete_version(self, number: int) -> None:
        """Note that the version of this number is complete because of a break."""
        self._repaired_number = number

    def overdue_problem(self, newest: int) -> str:
        """Explain why a keyframe is overdue; empty if none is."""
        return describe_overdue(
            self.last,
            newest=newest,
            first=self.first,
            versions=self.versions,
            problem=self.problem,
        )


def _count(report: CompactorReport) -> None:
    metrics.CHAIN_VERSIONS.set(report.chain.versions)
    metrics.CHAIN_BYTES.set(report.chain.num_bytes)
    metrics.COLLECTED.inc(report.collected)
    for written in report.written:
        metrics.FOLDED_BYTES.labels(kind=written.kind).inc(written.num_bytes)
        metrics.FOLDED.labels(kind=written.kind).observe(written.seconds)
    for failure in report.failures:
        metrics.COMPACTOR_FAILURES.labels(stage=failure.stage).inc()
