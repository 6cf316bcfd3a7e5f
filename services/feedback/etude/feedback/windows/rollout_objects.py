"""Objects of rollouts: assembled from the turn log, created once, deleted with their users."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from etude.common.blobs import MAX_CREATE_BYTES, MissingError, Store
from etude.common.errors import CorruptError
from etude.common.feedback import windows
from etude.common.turns import turn_log
from etude.common.weights.protocol import records
from etude.feedback.ledger.ledger import FeedbackLedger
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.turn_keys import read_turn
from etude.feedback.windows.assembly import UntrainableError, assemble_rollout
from etude.feedback.windows.waiting import ERASED, Erasure
from etude.v1 import turns_pb2

_CACHED_SEGMENTS = 8
"""Objects of turns in memory, of 8 MiB each."""


@dataclass(slots=True)
class RolloutObjects:
    """Writes the objects of rollouts; blocks."""

    ledger: FeedbackLedger
    """Its keys open sealed turns."""
    _segments: "OrderedDict[str, turns_pb2.TurnSegment]" = field(default_factory=OrderedDict)

    @property
    def store(self) -> Store:
        return self.ledger.log.store

    def write(self, history: RolloutHistory) -> str:
        """Write the object of a rollout, and return its digest.

        An object that is there already stays: an earlier attempt wrote it, or another service,
        whose window may name it. It may lack turns that came later.

        Raises:
            UntrainableError: its records cannot be trained on.
            StoreError: the store did not answer.
        """
        key = windows.rollout_key(*history.user, history.rollout)
        rollout = assemble_rollout(history.rollout, list(self._read_turns(history)))
        if rollout.ByteSize() > windows.MAX_ROLLOUT_BYTES:
            raise UntrainableError("TooLarge", f"{key} has {rollout.ByteSize()} bytes")
        data = windows.encode_rollout(rollout)
        if len(data) > MAX_CREATE_BYTES:
            raise UntrainableError("TooLarge", f"{key} has {len(data)} bytes compressed")
        stored = records.create_once(self.store, key, data)
        digest = blake3(stored).hexdigest()
        if stored != data:
            self._check(stored, digest, key, history)
        return digest

    def _check(self, stored: bytes, digest: str, key: str, history: RolloutHistory) -> None:
        try:
            found = windows.decode_rollout(stored, digest=digest, where=f"{self.store.url}/{key}")
        except CorruptError as error:
            raise UntrainableError("DamagedObject", str(error)) from error
        if found.rollout_id != history.rollout:
            raise UntrainableError("DamagedObject", f"{key} holds another rollout")

    def _read_turns(self, history: RolloutHistory) -> Iterator[turns_pb2.TurnRecord]:
        for turn in history.turns:
            sealed = self._read_segment(turn.place.key).turns[turn.place.position]
            try:
                record = read_turn(sealed, self.ledger.state, self.ledger.keys)
            except CorruptError as error:
                raise UntrainableError("IncompleteTurns", str(error)) from error
            if record is None:
                raise UntrainableError(ERASED, f"the key of turn {sealed.turn_id} is destroyed")
            yield record

    def _read_segment(self, key: str) -> turns_pb2.TurnSegment:
        segment = self._segments.get(key)
        if segment is None:
            where = f"{self.store.url}/{key}"
            try:
                segment = turn_log.decode_segment(self.store.get(key), where=where)
            except MissingError as error:
                raise UntrainableError("TurnsRemoved", str(error)) from error
            except CorruptError as error:
                raise UntrainableError("IncompleteTurns", str(error)) from error
            self._segments[key] = segment
        self._segments.move_to_end(key)
        while len(self._segments) > _CACHED_SEGMENTS:
            self._segments.popitem(last=False)
        return segment


def delete_rollouts(
    store: Store, users: Collection[UserId], erasures: Mapping[UserId, Erasure]
) -> None:
    """Delete the stored rollouts of erased users, but those of windows that knew the erasure.

    Safe to repeat. Such windows hold what a user did after agreeing again.

    Raises:
        CorruptError: a window is damaged.
        StoreError: the store did not answer.
    """
    keys = {info.key for user in users for info in store.list(windows.rollout_prefix(*user))}
    if not keys:
        return
    for number in windows.list_windows(store):
        manifest = windows.read_window(store, number)
        for each in manifest.rollouts:
            erasure = erasures.get(UserId(each.tenant, each.user))
            if erasure is not None and manifest.last_sequence >= erasure.sequence:
                keys.discard(windows.rollout_key(each.tenant, each.user, each.rollout))
    store.delete(sorted(keys))
