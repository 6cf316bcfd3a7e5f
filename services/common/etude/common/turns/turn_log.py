"""Turn log: records of turns, appended by several writers, durable once in the object store.

    turns/<writer>/<first:012d>.zst     one TurnSegment, compressed with a checksum
    removed-turns/<before_ms:015d>      empty: objects from before that time are being removed

Every start of a process is a writer of its own with consecutive objects, each of which is created
once and exists completely or not at all: no writer ever changes what another one wrote.

A removal is recorded before anything is deleted. Killed anywhere, it leaves no gap to a reader,
who takes all that is older than the record for removed, and the next removal goes on.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import zstandard
from blake3 import blake3
from google.protobuf.message import DecodeError

from etude.common.blobs import MAX_CREATE_BYTES, ExistsError, MissingError, ObjectInfo, Store
from etude.common.errors import CorruptError, FencedError, StoreError
from etude.v1 import turns_pb2

log = logging.getLogger(__name__)

PREFIX = "turns/"
REMOVED = "removed-turns/"
_REMOVED_KEY = re.compile(re.escape(REMOVED) + r"([0-9]{15})")
_DELETE_AT_ONCE = 1_000
"""Keys of one request."""
LINGER_S = 0.25
"""Wait for further turns before an object is written: each costs a round trip."""
RETRY_S = 1.0
_SEGMENT_BYTES = MAX_CREATE_BYTES // 2
"""Bytes of turns in one object, before compression."""
MAX_TURN_BYTES = MAX_CREATE_BYTES - (1 << 16)
"""Largest record: a million tokens and their log-probabilities have 8 MB."""
_LEVEL = 1


def identify_rollout(tenant: str, user: str, name: str) -> str:
    """Identify a rollout of one user by the name that its clients and its feedback use.

    Clients choose names themselves, so that two users' may be the same. 32 hexadecimal digits.
    """
    return blake3(json.dumps([tenant, user, name]).encode()).hexdigest(16)


def segment_key(writer: str, first: int) -> str:
    """Key of the object whose first turn has this number."""
    return f"{PREFIX}{writer}/{first:012d}.zst"


def encode_segment(segment: turns_pb2.TurnSegment) -> bytes:
    """Encode one object of the log."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    return compressor.compress(segment.SerializeToString())


def decode_segment(data: bytes, *, where: str) -> turns_pb2.TurnSegment:
    """Decode one object of the log.

    Raises:
        CorruptError: it is damaged, or no object of the log.
    """
    segment = turns_pb2.TurnSegment()
    limit = _SEGMENT_BYTES + MAX_TURN_BYTES
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= limit:
            raise CorruptError(f"{where}: {size} bytes of turns, at most {limit} are read")
        segment.ParseFromString(zstandard.ZstdDecompressor().decompress(data))
    except (zstandard.ZstdError, DecodeError) as error:
        raise CorruptError(f"{where}: no segment of turns: {error}") from error
    if segment_key(segment.writer, segment.first) not in where:
        raise CorruptError(f"{where}: holds turns of {segment.writer!r} from {segment.first} on")
    return segment


def read_turns(store: Store) -> Iterator[turns_pb2.TurnRecord]:
    """Read all durable turns, those of one writer in their order, but those that are removed.

    Raises:
        CorruptError: an object is damaged, or one is missing between two of a writer.
        StoreError: the store does not answer.
    """
    following: dict[str, int] = {}
    removed_ms = read_removed_ms(store)
    for info in store.list(PREFIX):
        where, writer = f"{store.url}/{info.key}", _name_writer(info)
        if writer not in following and is_older(info, removed_ms):
            continue
        try:
            segment = decode_segment(store.get(info.key), where=where)
        except MissingError as error:
            removed_ms = read_removed_ms(store)
            if not is_older(info, removed_ms):
                raise CorruptError(str(error)) from error
            following.pop(writer, None)
            continue
        # Of a writer whose first objects are removed the first one left may begin anywhere.
        expected = following.get(writer, segment.first if removed_ms else 0)
        if segment.first != expected:
            raise CorruptError(f"{where}: turns from {expected} on are missing before it")
        following[writer] = segment.first + len(segment.turns)
        yield from segment.turns


def read_removed_ms(store: Store) -> int:
    """Time before which turns are removed, in milliseconds since the epoch; 0 for never.

    To compare with the times of objects by the store's clock.
    """
    found = (_REMOVED_KEY.fullmatch(info.key) for info in store.list(REMOVED))
    return max((int(match[1]) for match in found if match), default=0)


def remove_turns(store: Store, *, before_ms: int, others: Sequence[str] = ()) -> int:
    """Remove the objects that were stored before a time; return how many were deleted.

    Keys of other objects that were made of turns may go with them, behind the same record.

    Safe to repeat, and for concurrent processes. Of one writer the first objects go: one that
    a clock which was set back made look older stays until those before it go. So does one whose
    store does not tell its time.

    Raises:
        StoreError: the store did not answer; the next call goes on.
    """
    before_ms = max(before_ms, read_removed_ms(store))
    old = [*others]
    for _, objects in itertools.groupby(store.list(PREFIX), _name_writer):
        first_ones = itertools.takewhile(lambda info: is_older(info, before_ms), objects)
        old += [info.key for info in first_ones]
    if not old:
        return 0
    newest = f"{REMOVED}{before_ms:015d}"
    with contextlib.suppress(ExistsError):
        store.create(newest, b"")
    for start in range(0, len(old), _DELETE_AT_ONCE):
        store.delete(old[start : start + _DELETE_AT_ONCE])
    store.delete([info.key for info in store.list(REMOVED) if info.key < newest])
    return len(old)


def _name_writer(info: ObjectInfo) -> str:
    return info.key.removeprefix(PREFIX).partition("/")[0]


def is_older(info: ObjectInfo, before_ms: int) -> bool:
    """Return true if an object was certainly stored before a time."""
    return 0 < 1_000 * info.modified_s < before_ms


@dataclass(slots=True)
class TurnLog:
    """Log of one process. Append from the event loop; `run` writes."""

    store: Store
    max_waiting_bytes: int
    """Records that may wait for the store; further ones are refused."""
    note_durable: Callable[[int], None] = lambda _: None
    """Told how many turns became durable."""
    writer: str = field(default_factory=lambda: uuid.uuid4().hex)
    waiting_bytes: int = 0
    _waiting: list[turns_pb2.TurnRecord] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _is_away: bool = False
    _next: int = 0
    """Number of the first turn that is not durable."""
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, turn: turns_pb2.TurnRecord) -> bool:
        """Queue a turn; false if too many wait, or if it is larger than an object may be."""
        size = turn.ByteSize()
        if size > MAX_TURN_BYTES or self.waiting_bytes + size > self.max_waiting_bytes:
            return False
        self._waiting.append(turn)
        self._sizes.append(size)
        self.waiting_bytes += size
        self._work.set()
        return True

    async def run(self) -> None:
        """Write until the log is closed and everything is durable.

        Raises:
            FencedError: another process writes under this writer's name.
        """
        while not (self._closed.is_set() and not self._waiting):
            await self._work.wait()
            if not self._closed.is_set():
                await asyncio.sleep(LINGER_S)
                self._work.clear()
            while self._waiting:
                await self._write()

    def close(self) -> None:
        """Let `run` end once everything is durable."""
        self._closed.set()
        self._work.set()

    async def _write(self) -> None:
        count = self._count_next()
        turns = self._waiting[:count]
        while not await self._try_write(turns):  # noqa: ASYNC110 - a store announces nothing
            await asyncio.sleep(RETRY_S)
        self._next += count
        self.waiting_bytes -= sum(self._sizes[:count])
        del self._waiting[:count], self._sizes[:count]
        self.note_durable(count)

    async def _try_write(self, turns: Sequence[turns_pb2.TurnRecord]) -> bool:
        try:
            await asyncio.to_thread(self._create, turns)
        except StoreError as error:
            if not self._is_away:
                log.warning("turns wait for the store: %s", error)
            self._is_away = True
            return False
        self._is_away = False
        return True

    def _count_next(self) -> int:
        count, size = 1, self._sizes[0]
        while count < len(self._sizes) and size + self._sizes[count] <= _SEGMENT_BYTES:
            size += self._sizes[count]
            count += 1
        return count

    def _create(self, turns: Sequence[turns_pb2.TurnRecord]) -> None:
        segment = turns_pb2.TurnSegment(writer=self.writer, first=self._next, turns=turns)
        key, data = segment_key(self.writer, self._next), encode_segment(segment)
        try:
            self.store.create(key, data)
        except ExistsError:
            # A create whose reply was lost took effect.
            if self.store.get(key) != data:
                raise FencedError(f"{self.store.url}/{key}: another process writes here") from None
