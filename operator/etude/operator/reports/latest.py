"""What every controller or broker has said."""

from dataclasses import dataclass, field
from typing import NamedTuple

from etude.operator.clock import Clock
from etude.operator.pools import figures as pool_figures
from etude.operator.reports.plausible import plausible, plausible_record
from etude.v1 import environments_pb2, run_pb2

RESUMED = "Resumed"
"""Event of a controller that has told of all that it found in the store."""


class Position(NamedTuple):
    """A place in a controller's stream of reports."""

    epoch: int = 0
    sequence: int = 0


class Happening(NamedTuple):
    """A checkpoint or an event, told once and replayed until it is dealt with."""

    position: Position
    checkpoint: run_pb2.CheckpointRecord | None
    event: run_pb2.RunEvent | None
    may_be_old: bool
    """Whether the checkpoint may have been found in the store; else it is newly saved."""


@dataclass(slots=True)
class RunReport:
    """What one run's controller has said."""

    is_connected: bool = False
    silent_since_s: float | None = None
    """Since when no stream is open; None while one is."""
    status: run_pb2.RunStatus | None = None
    """Newest status, also of a controller that is gone."""
    epoch: int = 0
    """Epoch of the controller that was heard last; each store counts its own."""
    status_epoch: int = 0
    """Epoch of the controller that said the status."""
    resumed_epoch: int = 0
    """Epoch of the controller that said last that it resumed."""
    progressed_s: float = 0.0
    """Monotonic time at which it last said something new."""
    silent_work_s: float | None = None
    """The same before its stream broke, until its words tell whether it worked meanwhile."""
    happenings: list[Happening] = field(default_factory=list)
    """Not dealt with yet, oldest first."""
    done: Position = field(default_factory=Position)
    """Everything up to here has been dealt with."""

    @property
    def is_current(self) -> bool:
        """Whether the controller that is connected has said the status itself."""
        return self.is_connected and self.status is not None and self.status_epoch == self.epoch


class Words(NamedTuple):
    """What one broker said last."""

    said: environments_pb2.WatchPoolResponse
    heard_s: float
    """On our monotonic clock."""

    def at_s(self, unix_ms: int) -> float:
        """A moment that it named, on our monotonic clock, however its own clock is set."""
        return self.heard_s + (unix_ms - self.said.told_unix_ms) / 1000


@dataclass(slots=True)
class PoolReport:
    """What one pool's brokers have said."""

    said: dict[int, Words] = field(default_factory=dict)
    """The newest words of each, by its place among them."""

    @property
    def newest(self) -> environments_pb2.WatchPoolResponse | None:
        """All of it as one report."""
        return pool_figures.combined([self.said[place].said for place in sorted(self.said)])


@dataclass(slots=True)
class ReportBook:
    """Reports by uid."""

    clock: Clock
    runs: dict[str, RunReport] = field(default_factory=dict)
    pools: dict[str, PoolReport] = field(default_factory=dict)

    def run(self, uid: str) -> RunReport:
        """The reports of a run."""
        if uid not in self.runs:
            now_s = self.clock.monotonic_s()
            self.runs[uid] = RunReport(silent_since_s=now_s, progressed_s=now_s)
        return self.runs[uid]

    def pool(self, uid: str) -> PoolReport:
        """The reports of a pool."""
        return self.pools.setdefault(uid, PoolReport())

    def hear(self, uid: str, place: int, said: environments_pb2.WatchPoolResponse) -> None:
        """Note what one of a pool's brokers says."""
        self.pool(uid).said[place] = Words(said, self.clock.monotonic_s())

    def take(self, uid: str, response: run_pb2.WatchRunResponse) -> bool:
        """Note one message of a controller; True when it should be acted on at once."""
        report = self.run(uid)
        position = Position(max(0, response.epoch), max(0, response.sequence))
        report.epoch = position.epoch
        if response.HasField("status"):
            report.status_epoch = position.epoch
            return self._take_status(report, plausible(response.status))
        if position <= report.done or any(h.position == position for h in report.happenings):
            return False
        checkpoint = None
        if response.HasField("checkpoint"):
            checkpoint = plausible_record(response.checkpoint)
        event = response.event if response.HasField("event") else None
        if event is not None and event.reason == RESUMED:
            report.resumed_epoch = position.epoch
        may_be_old = report.resumed_epoch != position.epoch
        report.happenings.append(Happening(position, checkpoint, event, may_be_old))
        return True

    def connected(self, uid: str) -> None:
        """The stream is open; what was done while it was not is heard next."""
        report = self.run(uid)
        report.is_connected = True
        report.silent_since_s = None
        report.silent_work_s = report.progressed_s
        report.progressed_s = self.clock.monotonic_s()

    def began(self, uid: str) -> None:
        """Another controller is up: what was done last was another's doing."""
        self.run(uid).progressed_s = self.clock.monotonic_s()

    def disconnected(self, uid: str) -> None:
        """The stream broke or could not be opened."""
        report = self.run(uid)
        if report.is_connected:
            report.silent_since_s = self.clock.monotonic_s()
        report.is_connected = False

    def ended(self, uid: str) -> None:
        """The controller and its pod are gone; the next may count anew, in another store."""
        report = self.run(uid)
        report.status_epoch = report.resumed_epoch = 0
        if not report.happenings:
            report.done = Position()

    def dealt_with(self, uid: str, position: Position) -> None:
        """Everything up to this position is registered or recorded."""
        report = self.run(uid)
        report.done = max(report.done, position)
        report.happenings = [h for h in report.happenings if h.position > report.done]

    def forget(self, uid: str) -> None:
        """The object is gone."""
        self.runs.pop(uid, None)
        self.pools.pop(uid, None)

    def _take_status(self, report: RunReport, status: run_pb2.RunStatus) -> bool:
        before, report.status = report.status, status
        silent_work_s, report.silent_work_s = report.silent_work_s, None
        if before is None or _stage(before) != _stage(status):
            report.progressed_s = self.clock.monotonic_s()
            return True
        if _work(before) != _work(status):
            report.progressed_s = self.clock.monotonic_s()
        elif silent_work_s is not None:
            report.progressed_s = silent_work_s
        return False


def _stage(status: run_pb2.RunStatus) -> tuple[object, ...]:
    """What changes rarely, and matters at once when it does."""
    return (status.state, status.phase, status.reason, status.observed_generation)


def _work(status: run_pb2.RunStatus) -> tuple[object, ...]:
    """What moves while a run makes progress."""
    counts = status.rollouts
    return (status.step, status.policy_version, counts.completed, counts.masked, counts.dropped)
