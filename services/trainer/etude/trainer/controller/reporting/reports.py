"""What others may know of a run: the newest status, and every checkpoint and event in order."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from etude.common.checkpoints.manifest import StoredCheckpoint
from etude.v1 import run_pb2

PACE_S = 0.2
"""Least time between two status messages of a stream; checkpoints and events do not wait."""

_MAX_HAPPENINGS = 10_000
"""Oldest ones are forgotten first; checkpoints are in the store in any case."""


@dataclass(slots=True)
class Reports:
    """One epoch's reports. Use it from the event loop only."""

    run_uid: str
    epoch: int
    status: run_pb2.RunStatus = field(default_factory=run_pb2.RunStatus)
    _happenings: list[run_pb2.WatchRunResponse] = field(default_factory=list)
    _sequence: int = 0
    _status_sequence: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once something newer is there, and then replaced."""

    def touch(self) -> None:
        """The status was changed: send it."""
        self._status_sequence = self._next()

    def state(self, state: run_pb2.RunState) -> None:
        """What the controller is doing now."""
        if self.status.state != state:
            self.status.state = state
            self.touch()

    def event(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Something worth a Kubernetes Event."""
        event = run_pb2.RunEvent(reason=reason, message=message[:1024], warning=warning)
        self._add(run_pb2.WatchRunResponse(event=event))

    def checkpoint(self, found: StoredCheckpoint, *, uri: str, keyframe: int | None = None) -> None:
        """A checkpoint is complete and shall be registered.

        Args:
            found: it.
            uri: where it lies.
            keyframe: number of the version at which the way to its own begins; None without one.
        """
        manifest = found.manifest
        record = run_pb2.CheckpointRecord(
            step=manifest.step,
            policy_version=manifest.policy_version,
            reason=manifest.reason,
            uri=uri,
            manifest_digest=found.digest,
            size_bytes=manifest.size_bytes,
            keyframe=keyframe,
            metrics=manifest.metrics,
            request=manifest.request,
            branch=manifest.branch,
        )
        if manifest.parent is not None:
            record.parent_digest = manifest.parent.digest
            record.parent_step = manifest.parent.step
        self._add(run_pb2.WatchRunResponse(checkpoint=record))

    def _add(self, report: run_pb2.WatchRunResponse) -> None:
        report.sequence = self._next()
        self._happenings.append(report)
        del self._happenings[:-_MAX_HAPPENINGS]

    def _next(self) -> int:
        self._sequence += 1
        self._news.set()
        self._news = asyncio.Event()
        return self._sequence

    async def watch(
        self, *, epoch: int, after_sequence: int
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        """Everything after a known position; a position of another epoch means from the start.

        The newest status comes in any case: whoever listens anew may have forgotten it, and the
        next change of it may be an evaluation away.
        """
        seen, told = (after_sequence if epoch == self.epoch else 0), 0
        while True:
            while self._sequence <= seen and self._status_sequence <= told:
                await self._news.wait()
            upto = self._sequence
            for report in [r for r in self._happenings if r.sequence > seen]:
                yield self._addressed(report)
            if self._status_sequence > told:
                told = self._status_sequence
                report = run_pb2.WatchRunResponse(sequence=self._status_sequence)
                report.status.CopyFrom(self.status)
                yield self._addressed(report)
            seen = upto
            await asyncio.sleep(PACE_S)

    def _addressed(self, report: run_pb2.WatchRunResponse) -> run_pb2.WatchRunResponse:
        report.run_uid, report.epoch = self.run_uid, self.epoch
        return report
