"""Trajectory log of one rollout worker: written in groups, and cut where its rollouts ended."""

import asyncio
import logging
import math
import time
import uuid
from dataclasses import dataclass, field

from typing_extensions import override

from etude.common.blobs import Store
from etude.common.durable_log import DurableLog, encode_frame
from etude.common.errors import StoreError
from etude.v1 import trajectory_log_pb2

log = logging.getLogger(__name__)

TRAJECTORIES = "trajectories/"

MAX_PENDING_BYTES = 256 << 20
"""Records that wait for a store that is away; beyond them rollouts wait as well."""
KEEP_S = 60.0
"""How long the records of a finished rollout stay: the controller journals it meanwhile."""
CUT_EVERY_S = 60.0
CLOSE_S = 5.0
"""Longest wait for the store when the worker closes."""


@dataclass(slots=True, kw_only=True)
class TrajectoryLog(DurableLog):
    """Records of one worker process, its only writer; run() writes and cuts it."""

    writer: str = field(default_factory=lambda: uuid.uuid4().hex)
    _firsts: dict[str, int] = field(default_factory=dict, init=False)
    """First sequence of each rollout that is under way, or whose end is young."""
    _ended: dict[str, float] = field(default_factory=dict, init=False)
    """When rollouts ended."""
    _dropped: set[str] = field(default_factory=set, init=False)
    """Ended rollouts that may still run for a moment, and are no longer recorded."""

    @classmethod
    def of_run(cls, store: Store, run_uid: str) -> "TrajectoryLog":
        """A new log in the store of a run."""
        return cls(store=store, owner=run_uid, epoch=1, next_sequence=1)

    @property
    @override
    def prefix(self) -> str:
        return f"{TRAJECTORIES}{self.writer}/"

    @override
    def is_fenced(self) -> bool:
        # What an old controller's worker still writes is replaced by the place of its successor's.
        return False

    def append(self, record: trajectory_log_pb2.TrajectoryRecord) -> None:
        """Queue a record, which is durable soon; no caller waits for that.

        Raises:
            ValueError: the record is larger than a segment.
        """
        kind = record.WhichOneof("body")
        assert kind is not None  # noqa: S101 - recorders set it
        if record.rollout_id in self._dropped:
            return
        number = record.DESCRIPTOR.fields_by_name[kind].number
        sequence = self.enqueue(
            encode_frame(number, self.next_sequence, record.SerializeToString())
        )
        self._firsts.setdefault(record.rollout_id, sequence)
        self._ended.pop(record.rollout_id, None)

    def note_end(self, rollout_id: str) -> None:
        """Take note that a rollout's result was handed in: its records may go soon."""
        self._ended[rollout_id] = time.monotonic()

    def note_drop(self, rollout_id: str) -> None:
        """Take note that a rollout is cancelled for good."""
        if rollout_id in self._firsts:
            self._dropped.add(rollout_id)
            self.note_end(rollout_id)

    async def wait_for_room(self) -> None:
        """Wait while too many bytes are not durable."""
        if self.pending_bytes > MAX_PENDING_BYTES:
            async with self._changed:
                await self._changed.wait_for(lambda: self.pending_bytes <= MAX_PENDING_BYTES)

    @override
    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(), name="write-trajectories")
            tasks.create_task(self._keep_cutting(), name="cut-trajectories")

    async def _write(self) -> None:
        await DurableLog.run(self)

    async def _keep_cutting(self) -> None:
        while True:
            await asyncio.sleep(CUT_EVERY_S)
            try:
                await self.cut(now_s=time.monotonic())
            except StoreError as error:
                log.info("finished trajectories stay for now: %s", error)

    async def close(self) -> None:
        """Write what waits, and delete what no rollout needs, unless the store is away."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.wait_durable()
                await self.cut(now_s=math.inf)
        except (TimeoutError, StoreError) as error:
            log.warning("the newest turns of rollouts are not recorded: %s", error)

    async def cut(self, *, now_s: float) -> None:
        """Delete the segments before the first record of any rollout that is under way.

        Raises:
            StoreError: the store does not answer.
        """
        for rollout_id in [each for each, at in self._ended.items() if at + KEEP_S <= now_s]:
            del self._ended[rollout_id]
            self._firsts.pop(rollout_id, None)
            self._dropped.discard(rollout_id)
        needed = min(self._firsts.values(), default=self.durable_sequence + 1)
        is_idle = not self._firsts and not self.depth
        await asyncio.to_thread(self._delete_before, needed, is_idle=is_idle)

    def _delete_before(self, needed: int, *, is_idle: bool) -> None:
        keys = sorted(info.key for info in self.store.list(self.prefix))
        firsts = [int(key.rsplit("/", 1)[1].removesuffix(".wal")) for key in keys]
        # A segment ends where the next one begins.
        over = [key for key, end in zip(keys, firsts[1:], strict=False) if end <= needed]
        if is_idle:  # but not one that was written meanwhile
            newest = zip(keys[-1:], firsts[-1:], strict=True)
            over += [key for key, first in newest if first < needed]
        if over:
            self.store.delete(over)
