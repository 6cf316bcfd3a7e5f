"""History of a group: the recorded turns of its rollouts, and how each goes on from there."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from etude.agent.trajectory import Trajectory
from etude.common.errors import StoreError
from etude.trainer.rollouts.protocol import GroupRequest
from etude.trainer.rollouts.trajectories.faults import is_divergence, may_spare_environment
from etude.trainer.rollouts.trajectories.log import TrajectoryLog
from etude.trainer.rollouts.trajectories.reader import TrajectoryReader
from etude.trainer.rollouts.trajectories.recorded_rollout import Place, RecordedRollout
from etude.trainer.rollouts.trajectories.recorder import RolloutRecorder
from etude.trainer.rollouts.trajectories.resume_counts import Resume, ResumeCause, ResumeCounts
from etude.trainer.rollouts.trajectories.stored_routes import store_routes
from etude.v1 import environments_pb2, rollout_pb2

log = logging.getLogger(__name__)

READ_PAUSES_S = (1, 2, 4, 8)
"""Pauses between attempts to read the records of a group."""


@dataclass(slots=True, kw_only=True)
class GroupHistory:
    """Recorded rollouts of one group, by id."""

    request: GroupRequest
    log: TrajectoryLog
    reader: TrajectoryReader
    counts: ResumeCounts = field(default_factory=ResumeCounts)
    _past: dict[str, RecordedRollout] = field(default_factory=dict)

    async def load(self, rollout_ids: Iterable[str]) -> None:
        """Read what earlier workers recorded, if there may be any."""
        if not self.request.is_continued:
            return
        found = await self._read_group()
        for rollout_id in rollout_ids:
            recorded = found.get(rollout_id, RecordedRollout())
            past = recorded.cut_abandoned(self.request.rollbacks)
            if past.turns:
                self._past[rollout_id] = past
            else:
                self.counts.add_redrawn(ResumeCause.UNRECORDED, recorded.num_tokens)

    async def _read_group(self) -> Mapping[str, RecordedRollout]:
        """Read the records of the group; none if the store stays away."""
        for pause_s in (*READ_PAUSES_S, None):
            try:
                return await self.reader.read_group(self.request.group_id)
            except StoreError as error:
                log.warning("records of %s cannot be read: %s", self.request.group_id, error)
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        return {}

    async def take_over(
        self,
        rollout_id: str,
        take: Callable[[environments_pb2.Lease], Awaitable[bool]],
        *,
        is_whole: bool,
    ) -> environments_pb2.Lease | None:
        """The environment of a rollout that goes on, if it is still there.

        One that had ended needs none: its turns, results and change are repeated as recorded.

        Args:
            rollout_id: of the rollout.
            take: holds a lease; False if it is gone.
            is_whole: True if the first recorded change is that of the whole rollout.
        """
        past = self._past.get(rollout_id)
        if past is None or past.lease is None:
            return None
        if (is_whole and past.changes) or await take(past.lease):
            return past.lease
        past.lease = None
        return None

    def recorder(
        self, rollout_id: str, index: int, *, attempt: int, lost_s: Callable[[], float]
    ) -> RolloutRecorder:
        """Recorder of an attempt, which goes on from what was recorded."""
        return RolloutRecorder(
            log=self.log,
            rollout_id=rollout_id,
            group_id=self.request.group_id,
            index=index,
            place=Place(self.request.epoch, self.request.dispatch, attempt),
            rollout=self._past.pop(rollout_id, RecordedRollout()),
            lost_s=lost_s,
            is_continued=self.request.is_continued or attempt > 0,
        )

    def count_resume(self, recorder: RolloutRecorder, resume: Resume) -> None:
        """Count a rollout that goes on."""
        self.counts.add(resume, self._cause(recorder.place.attempt))

    def keep(self, recorder: RolloutRecorder, error: Exception | None, *, is_sound: bool) -> None:
        """Keep the turns of an attempt that ended with a fault, for the next one.

        Args:
            recorder: of the attempt.
            error: that ended it, if one did.
            is_sound: True if its environment did all that it was asked to.
        """
        rollout = recorder.rollout
        if is_divergence(error):
            self.counts.add_redrawn(ResumeCause.DIVERGED, rollout.num_tokens)
        elif rollout.turns:
            if not is_sound or not may_spare_environment(error):
                rollout.lease = None
            self._past[recorder.rollout_id] = rollout

    def has_lease(self, rollout_id: str) -> bool:
        """True if a rollout may go on in the environment that it had."""
        past = self._past.get(rollout_id)
        return past is not None and past.lease is not None

    async def store_routes(
        self, rollout_id: str, trajectory: Trajectory, rollout: rollout_pb2.Rollout
    ) -> None:
        """Store the recorded experts of a rollout, where there are any, and refer to them."""
        for place, link in enumerate(trajectory.links):
            if link.routes is None:
                continue
            name = f"{rollout_id}.{place}"
            reference = await store_routes(
                self.log.store, link.routes, group_id=self.request.group_id, link=name
            )
            if reference is not None:
                rollout.links[place].routes.CopyFrom(reference)

    def count_masked(self, rollout_id: str) -> None:
        """Count the turns of a rollout that is masked after its last attempt."""
        past = self._past.pop(rollout_id, None)
        if past is not None:
            self.counts.lost += 1
            self.counts.lost_tokens += past.num_tokens

    def _cause(self, attempt: int) -> ResumeCause:
        if attempt:
            return ResumeCause.FAULT
        return ResumeCause.WORKER if self.request.dispatch else ResumeCause.CONTROLLER

    def close(self, rollout_ids: Iterable[str]) -> None:
        """Let the records of rollouts go that are handed in."""
        for rollout_id in rollout_ids:
            self.log.note_end(rollout_id)
