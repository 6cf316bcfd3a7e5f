"""Report stream of a run: newest status, checkpoints and events in order; and its RunService."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
from typing_extensions import override

from etude.common.checkpoints.manifest import StoredCheckpoint
from etude.trainer.controller.reporting.commands import RunCommands
from etude.v1 import run_pb2, run_pb2_grpc

NAME = "etude.v1.RunService"

PACE_S = 0.2
"""Least time between two status messages of a stream; checkpoints and events do not wait."""

_MAX_HAPPENINGS = 10_000
"""The oldest are dropped first; checkpoints are in the store in any case."""


@dataclass(slots=True)
class RunReports:
    """Reports of one epoch. Use it from the event loop only."""

    run_uid: str
    epoch: int
    status: run_pb2.RunStatus = field(default_factory=run_pb2.RunStatus)
    _happenings: list[run_pb2.WatchRunResponse] = field(default_factory=list)
    _sequence: int = 0
    _status_sequence: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the next report, and then replaced."""

    def mark_changed(self) -> None:
        """Mark the status as changed, so that it is sent."""
        self._status_sequence = self._advance()

    def set_state(self, state: run_pb2.RunState) -> None:
        if self.status.state != state:
            self.status.state = state
            self.mark_changed()

    def add_event(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Add an event, which becomes a Kubernetes Event."""
        event = run_pb2.RunEvent(reason=reason, message=message[:1024], warning=warning)
        self._add(run_pb2.WatchRunResponse(event=event))

    def add_checkpoint(
        self, found: StoredCheckpoint, *, uri: str, keyframe: int | None = None
    ) -> None:
        """Add a complete checkpoint, which is to be registered."""
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
        report.sequence = self._advance()
        self._happenings.append(report)
        del self._happenings[:-_MAX_HAPPENINGS]

    def _advance(self) -> int:
        self._sequence += 1
        self._news.set()
        self._news = asyncio.Event()
        return self._sequence

    async def watch(
        self, *, epoch: int, after_sequence: int
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        """Stream all reports after a position; one of another epoch means from the start.

        The newest status is always sent: a reconnected watcher may not have it, and its next change
        may be an evaluation away.
        """
        sent_sequence, status_sent = (after_sequence if epoch == self.epoch else 0), 0
        while True:
            while self._sequence <= sent_sequence and self._status_sequence <= status_sent:
                await self._news.wait()
            upto = self._sequence
            for report in [r for r in self._happenings if r.sequence > sent_sequence]:
                yield self._addressed(report)
            if self._status_sequence > status_sent:
                status_sent = self._status_sequence
                report = run_pb2.WatchRunResponse(sequence=self._status_sequence)
                report.status.CopyFrom(self.status)
                yield self._addressed(report)
            sent_sequence = upto
            await asyncio.sleep(PACE_S)

    def _addressed(self, report: run_pb2.WatchRunResponse) -> run_pb2.WatchRunResponse:
        report.run_uid, report.epoch = self.run_uid, self.epoch
        return report


@dataclass(slots=True)
class RunService(run_pb2_grpc.RunServiceServicer):
    """Translates between gRPC and the controller."""

    reports: RunReports
    orders: RunCommands

    @override
    async def WatchRun(
        self,
        request: run_pb2.WatchRunRequest,
        context: grpc.aio.ServicerContext[run_pb2.WatchRunRequest, run_pb2.WatchRunResponse],
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        async for report in self.reports.watch(
            epoch=request.epoch, after_sequence=request.after_sequence
        ):
            yield report

    @override
    async def Command(
        self,
        request: run_pb2.CommandRequest,
        context: grpc.aio.ServicerContext[run_pb2.CommandRequest, run_pb2.CommandResponse],
    ) -> run_pb2.CommandResponse:
        self.orders.accept(request)
        return run_pb2.CommandResponse()
