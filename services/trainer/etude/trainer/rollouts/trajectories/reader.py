"""Reader of trajectory logs: what workers that are gone left of a group's rollouts."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from etude.common.blobs import MissingError, Store
from etude.common.durable_log import segments
from etude.common.errors import CorruptError
from etude.trainer.rollouts.trajectories.log import TRAJECTORIES
from etude.trainer.rollouts.trajectories.recorded_rollout import Place, RecordedRollout
from etude.v1 import trajectory_log_pb2

log = logging.getLogger(__name__)

Records = list[trajectory_log_pb2.TrajectoryRecord]


@dataclass(slots=True)
class TrajectoryReader:
    """Rollouts in the logs of all workers of a run."""

    store: Store
    run_uid: str
    _groups: dict[str, set[str]] = field(default_factory=dict)
    """Keys of the segments with records of each group."""
    _indexed: set[str] = field(default_factory=set)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read_group(self, group_id: str) -> dict[str, RecordedRollout]:
        """Read the rollouts of a group by id, as far as they were recorded.

        Raises:
            StoreError: the store does not answer.
        """
        async with self._lock:
            return await asyncio.to_thread(self._read_group, group_id)

    def _read_group(self, group_id: str) -> dict[str, RecordedRollout]:
        for info in self.store.list(TRAJECTORIES):
            if info.key not in self._indexed:
                for record in self._read_segment(info.key):
                    self._groups.setdefault(record.group_id, set()).add(info.key)
                self._indexed.add(info.key)
        found: Records = []
        for key in self._groups.get(group_id, ()):
            found += [each for each in self._read_segment(key) if each.group_id == group_id]
        return newest_rollouts(found)

    def _read_segment(self, key: str) -> Records:
        """Records of a segment; of one that is damaged, or gone, none."""
        where = f"{self.store.url}/{key}"
        try:
            return _parse_segment(self.store.get(key), where, self.run_uid)
        except MissingError:
            return []  # its rollouts have ended
        except CorruptError as error:
            # Rollouts that had records there are cut before them.
            log.warning("records of rollouts are lost: %s", error)
            return []


def _parse_segment(data: bytes, where: str, run_uid: str) -> Records:
    """Parse the records of a segment.

    Raises:
        CorruptError: it is damaged, or of another run.
    """
    segment = segments.decode_segment(data, where=where)
    if segment.owner != run_uid:
        raise CorruptError(f"{where} belongs to {segment.owner}, not to {run_uid}")
    parse = trajectory_log_pb2.TrajectoryRecord.FromString
    try:
        return [parse(bytes(record.payload)) for record in segment.records]
    except DecodeError as cause:
        raise CorruptError(f"{where}: a record cannot be read: {cause}") from cause


def newest_rollouts(
    records: Iterable[trajectory_log_pb2.TrajectoryRecord],
) -> dict[str, RecordedRollout]:
    """The newest beginning of each rollout that is complete, by id; pure.

    A beginning counts once all records that it carried over are there; records behind a gap are
    left out.
    """
    beginnings: dict[str, dict[Place, dict[int, trajectory_log_pb2.TrajectoryRecord]]] = {}
    for record in records:
        places = beginnings.setdefault(record.rollout_id, {})
        places.setdefault(Place.read(record.place), {})[record.number] = record
    found: dict[str, RecordedRollout] = {}
    for rollout_id, places in beginnings.items():
        for place in sorted(places, reverse=True):
            kept = _consecutive(places[place])
            if kept and kept[0].HasField("start") and len(kept) > kept[0].start.carried:
                found[rollout_id] = RecordedRollout.fold(kept)
                break
    return found


def _consecutive(numbered: dict[int, trajectory_log_pb2.TrajectoryRecord]) -> Records:
    """Records from number 0 up to the first that is missing."""
    kept: Records = []
    while (record := numbered.get(len(kept))) is not None:
        kept.append(record)
    return kept
