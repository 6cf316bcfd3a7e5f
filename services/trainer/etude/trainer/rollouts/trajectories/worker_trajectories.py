"""Trajectories of a rollout worker: its log, written in the background, and those of others."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from etude.common.api.storage import Storage
from etude.common.stores import open_run_store
from etude.trainer.rollouts.protocol import GroupRequest
from etude.trainer.rollouts.trajectories.history import GroupHistory
from etude.trainer.rollouts.trajectories.log import TrajectoryLog
from etude.trainer.rollouts.trajectories.reader import TrajectoryReader


@dataclass(slots=True)
class WorkerTrajectories:
    """Log and reader of one worker, opened with its first group."""

    run_uid: str
    storage: Storage
    _log: TrajectoryLog | None = None
    _reader: TrajectoryReader | None = None
    _writing: asyncio.Task[None] | None = None

    def history(self, request: GroupRequest) -> GroupHistory:
        """History of a group.

        An error of the writing task is raised here: without it nothing would be recorded.

        Raises:
            StoreError: the store cannot be opened.
        """
        if self._log is None or self._reader is None or self._writing is None:
            store = open_run_store(self.storage.uri, self.storage)
            self._log = TrajectoryLog.of_run(store, self.run_uid)
            self._reader = TrajectoryReader(store, self.run_uid)
            self._writing = asyncio.create_task(self._log.run(), name="trajectories")
        elif self._writing.done():
            self._writing.result()
        return GroupHistory(request=request, log=self._log, reader=self._reader)

    def drop(self, rollout_ids: Iterable[str]) -> None:
        """Let the records of rollouts go that are cancelled for good."""
        if self._log is not None:
            for rollout_id in rollout_ids:
                self._log.note_drop(rollout_id)

    async def close(self) -> None:
        """Write what waits, and delete what no rollout needs."""
        if self._log is None or self._writing is None:
            return
        writing, self._writing = self._writing, None
        if not writing.done():
            await self._log.close()
            writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
