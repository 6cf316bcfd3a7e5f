"""Report store: the newest reports of every controller, broker and feedback service."""

from dataclasses import dataclass, field
from typing import NamedTuple

from etude.operator.clock import Clock
from etude.operator.remotes import combined_report as pool_figures
from etude.operator.remotes.sanitize import sanitize_checkpoint, sanitize_status
from etude.v1 import environments_pb2, release_pb2, run_pb2

RESUMED = "Resumed"
"""Event of a controller that has reported everything that it found in the object store."""


class ReportPosition(NamedTuple):
    """A position in a controller's stream of reports."""

    epoch: int = 0
    sequence: int = 0


class PendingReport(NamedTuple):
    """A checkpoint or an event of a controller, replayed until it is acknowledged."""

    position: ReportPosition
    checkpoint: run_pb2.CheckpointRecord | None
    event: run_pb2.RunEvent | None
    may_be_old: bool
    """Whether the checkpoint may be an old one from the object store; else it is newly saved."""


@dataclass(slots=True)
class RunReport:
    """Reports of one run's controller."""

    is_connected: bool = False
    disconnected_since_s: float | None = None
    """Time since which no stream is open; None while one is."""
    status: run_pb2.RunStatus | None = None
    """Newest status, also of a controller that has ended."""
    epoch: int = 0
    """Epoch of the last message; each object store counts its own."""
    status_epoch: int = 0
    """Epoch of the controller that reported the status."""
    resumed_epoch: int = 0
    """Epoch of the last controller that reported its resume."""
    last_progress_s: float = 0.0
    """Monotonic time of the last progress."""
    progress_before_s: float | None = None
    """The same before the stream broke, until a status shows whether there was progress since."""
    pending: list[PendingReport] = field(default_factory=list)
    """Unacknowledged reports, oldest first."""
    acknowledged: ReportPosition = field(default_factory=ReportPosition)
    """Position of the last acknowledged report."""

    @property
    def is_current(self) -> bool:
        """Return true if the connected controller itself reported the status."""
        return self.is_connected and self.status is not None and self.status_epoch == self.epoch


class ReleaseAnswer(NamedTuple):
    """The answer of a feedback service to a request."""

    request_id: str
    decision: release_pb2.ReleaseDecision


class BrokerReport(NamedTuple):
    """The last report of one broker."""

    response: environments_pb2.WatchPoolResponse
    received_s: float
    """Monotonic time of its arrival."""

    def to_local_s(self, unix_ms: int) -> float:
        """A time of the broker on the local monotonic clock, independent of clock skew."""
        return self.received_s + (unix_ms - self.response.told_unix_ms) / 1000


@dataclass(slots=True)
class PoolReport:
    """Reports of one pool's brokers."""

    by_broker: dict[int, BrokerReport] = field(default_factory=dict)
    """The newest report of each broker, by its ordinal."""

    @property
    def newest(self) -> environments_pb2.WatchPoolResponse | None:
        return pool_figures.combine_reports(
            [self.by_broker[place].response for place in sorted(self.by_broker)]
        )


@dataclass(slots=True)
class ReportStore:
    """Reports by uid of their run, pool or route."""

    clock: Clock
    runs: dict[str, RunReport] = field(default_factory=dict)
    pools: dict[str, PoolReport] = field(default_factory=dict)
    routes: dict[str, release_pb2.GetReleaseStatusResponse] = field(default_factory=dict)
    release_answers: dict[str, ReleaseAnswer] = field(default_factory=dict)
    """The newest one of each route."""

    def run(self, uid: str) -> RunReport:
        if uid not in self.runs:
            now_s = self.clock.monotonic_s()
            self.runs[uid] = RunReport(disconnected_since_s=now_s, last_progress_s=now_s)
        return self.runs[uid]

    def pool(self, uid: str) -> PoolReport:
        return self.pools.setdefault(uid, PoolReport())

    def add_broker_report(
        self, uid: str, ordinal: int, report: environments_pb2.WatchPoolResponse
    ) -> None:
        self.pool(uid).by_broker[ordinal] = BrokerReport(report, self.clock.monotonic_s())

    def add_controller_message(self, uid: str, response: run_pb2.WatchRunResponse) -> bool:
        """Store a message of a controller; returns True if it needs an immediate pass."""
        report = self.run(uid)
        position = ReportPosition(max(0, response.epoch), max(0, response.sequence))
        report.epoch = position.epoch
        if response.HasField("status"):
            report.status_epoch = position.epoch
            return self._take_status(report, sanitize_status(response.status))
        if position <= report.acknowledged or any(h.position == position for h in report.pending):
            return False
        checkpoint = None
        if response.HasField("checkpoint"):
            checkpoint = sanitize_checkpoint(response.checkpoint)
        event = response.event if response.HasField("event") else None
        if event is not None and event.reason == RESUMED:
            report.resumed_epoch = position.epoch
        may_be_old = report.resumed_epoch != position.epoch
        report.pending.append(PendingReport(position, checkpoint, event, may_be_old))
        return True

    def record_connected(self, uid: str) -> None:
        """Record an opened stream; the next status shows the progress made without one."""
        report = self.run(uid)
        report.is_connected = True
        report.disconnected_since_s = None
        report.progress_before_s = report.last_progress_s
        report.last_progress_s = self.clock.monotonic_s()

    def record_new_controller(self, uid: str) -> None:
        """Record a new controller, with its progress counted from now."""
        self.run(uid).last_progress_s = self.clock.monotonic_s()

    def record_disconnected(self, uid: str) -> None:
        report = self.run(uid)
        if report.is_connected:
            report.disconnected_since_s = self.clock.monotonic_s()
        report.is_connected = False

    def record_pod_deleted(self, uid: str) -> None:
        """Record a deleted controller pod; the next may count from zero, in another store."""
        report = self.run(uid)
        report.status_epoch = report.resumed_epoch = 0
        if not report.pending:
            report.acknowledged = ReportPosition()

    def acknowledge(self, uid: str, position: ReportPosition) -> None:
        report = self.run(uid)
        report.acknowledged = max(report.acknowledged, position)
        report.pending = [h for h in report.pending if h.position > report.acknowledged]

    def forget(self, uid: str) -> None:
        self.runs.pop(uid, None)
        self.pools.pop(uid, None)
        self.routes.pop(uid, None)
        self.release_answers.pop(uid, None)

    def _take_status(self, report: RunReport, status: run_pb2.RunStatus) -> bool:
        before, report.status = report.status, status
        silent_work_s, report.progress_before_s = report.progress_before_s, None
        if before is None or _stage_fields(before) != _stage_fields(status):
            report.last_progress_s = self.clock.monotonic_s()
            return True
        if _progress_fields(before) != _progress_fields(status):
            report.last_progress_s = self.clock.monotonic_s()
        elif silent_work_s is not None:
            report.last_progress_s = silent_work_s
        return False


def _stage_fields(status: run_pb2.RunStatus) -> tuple[object, ...]:
    """Fields that change rarely and need an immediate pass."""
    return (status.state, status.phase, status.reason, status.observed_generation)


def _progress_fields(status: run_pb2.RunStatus) -> tuple[object, ...]:
    """Fields that change while a run makes progress."""
    counts = status.rollouts
    return (status.step, status.policy_version, counts.completed, counts.masked, counts.dropped)
