"""Writer of a durable log: records are queued in order, and written in groups."""

import abc
import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from etude.common.blobs import MAX_CREATE_BYTES, ExistsError, Store
from etude.common.durable_log import segments
from etude.common.errors import CorruptError, FencedError, StoreError
from etude.common.store_retry import StoreRetry

_MAX_ATTEMPTS = 16
"""Each lost attempt means that another writer started; more of them are a broken set-up."""


def epoch_key(prefix: str, epoch: int) -> str:
    """Key of the object whose existence opens an epoch."""
    return f"{prefix}epochs/{epoch:06d}"


def claim_log_epoch(store: Store, prefix: str, *, holder: str) -> int:
    """Open the next epoch, which fences all earlier writers.

    Raises:
        FencedError: other writers kept winning.
        CorruptError: an object among the epochs has an invalid key.
    """
    content = f"{holder} {uuid.uuid4().hex}".encode()
    for _ in range(_MAX_ATTEMPTS):
        epoch = _latest_epoch(store, prefix) + 1
        key = epoch_key(prefix, epoch)
        try:
            store.create(key, content)
        except ExistsError:
            # A create whose reply was lost took effect; anything else is another writer.
            if store.get(key) != content:
                continue
        return epoch
    raise FencedError(f"{store.url}: {_MAX_ATTEMPTS} other writers opened an epoch meanwhile")


def is_log_fenced(store: Store, prefix: str, epoch: int) -> bool:
    """Return true if a newer writer took over."""
    return store.head(epoch_key(prefix, epoch + 1)) is not None


def _latest_epoch(store: Store, prefix: str) -> int:
    folder = f"{prefix}epochs/"
    latest = 0
    for info in store.list(folder):
        name = info.key.removeprefix(folder)
        if not name.isascii() or not name.isdigit():
            raise CorruptError(f"{store.url}/{info.key}: not the key of an epoch")
        latest = max(latest, int(name))
    return latest


LINGER_S = 0.25
"""Delay of a record that no caller awaits, to batch it: each object costs a round trip."""

_ROOM = MAX_CREATE_BYTES - 4_096
"""Bytes of records in one segment; header and commit need the rest."""


def segment_key(prefix: str, epoch: int, first: int) -> str:
    """Key of the segment whose first record has this sequence."""
    return f"{prefix}{epoch:06d}/{first:012d}.wal"


class LazyFrame(Protocol):
    """A record that is framed in the thread that writes it, because it is large."""

    @property
    def num_bytes(self) -> int:
        """Upper bound of the size of its frame."""
        ...

    def encode(self, sequence: int) -> bytes:
        """The record with its frame."""
        ...


class QueuedFrame(NamedTuple):
    """A record that waits to be written."""

    sequence: int
    content: bytes | LazyFrame

    @property
    def num_bytes(self) -> int:
        content = self.content
        return len(content) if isinstance(content, bytes) else content.num_bytes

    def encode(self) -> bytes:
        content = self.content
        return content if isinstance(content, bytes) else content.encode(self.sequence)


@dataclass(slots=True)
class DurableLog(abc.ABC):
    """Log of one epoch. Enqueue from the event loop only; run() does all writing."""

    store: Store
    owner: str
    """Uid of the run, or of the ledger, that the log belongs to."""
    epoch: int
    next_sequence: int
    store_retry: StoreRetry = field(default_factory=StoreRetry, kw_only=True)
    gather_s: float = field(default=0.0, kw_only=True)
    """Delay before a write in which more records join it, even if callers wait."""
    is_away: bool = field(default=False, kw_only=True)
    """True while the newest write failed and is retried."""
    pending_bytes: int = field(default=0, init=False)
    """Bytes of the records that are not durable yet; of lazy frames the upper bound."""
    _queue: list[QueuedFrame] = field(default_factory=list, init=False)
    _durable: int = field(init=False)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)
    _work: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _urgent: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while a segment is written, or while the epoch changes."""

    def __post_init__(self) -> None:
        self._durable = self.next_sequence - 1

    @property
    @abc.abstractmethod
    def prefix(self) -> str:
        """Prefix of the log's keys in the store, which ends with a slash."""

    @abc.abstractmethod
    def is_fenced(self) -> bool:
        """Ask the store whether a newer writer took over."""

    @property
    def last_sequence(self) -> int:
        """Sequence of the newest record, durable or not."""
        return self.next_sequence - 1

    @property
    def durable_sequence(self) -> int:
        """Sequence of the newest record that is in the store."""
        return self._durable

    @property
    def depth(self) -> int:
        """Number of records that are not durable yet."""
        return self.last_sequence - self._durable

    def enqueue(self, content: bytes | LazyFrame) -> int:
        """Queue a frame, which has the next sequence, and return that.

        Wait until it is durable before acting on it.
        """
        sequence = self.next_sequence
        frame = QueuedFrame(sequence, content)
        self._queue.append(frame)
        self.pending_bytes += frame.num_bytes
        self.next_sequence += 1
        self._work.set()
        return sequence

    async def wait_durable(self, sequence: int | None = None) -> None:
        """Wait until a record and all before it are in the store; the newest one if None."""
        target = self.last_sequence if sequence is None else sequence
        self._urgent.set()
        async with self._changed:
            await self._changed.wait_for(lambda: self._durable >= target)

    async def wait_durable_or_store_down(self, sequence: int) -> None:
        """Wait until a record is durable, or the store fails."""
        self._urgent.set()
        async with self._changed:
            await self._changed.wait_for(lambda: self._durable >= sequence or self.is_away)

    async def run(self) -> None:
        """Write until cancelled.

        Raises:
            StoreError: the store stayed away longer than the retry limit.
            FencedError: a newer writer took over; nothing was acknowledged since.
        """
        while True:
            await self._work.wait()
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._urgent.wait()
            except TimeoutError:
                pass
            if self.gather_s:
                await asyncio.sleep(self.gather_s)
            self._urgent.clear()
            self._work.clear()
            while self._queue:
                async with self._writing:
                    await self._flush()

    async def _flush(self) -> None:
        frames = self._take()
        if not frames:
            return
        await self.store_retry.retry(
            segment_key(self.prefix, self.epoch, frames[0].sequence),
            lambda: self._try_write(frames),
        )
        num_bytes = sum(frame.num_bytes for frame in frames)
        async with self._changed:
            self.pending_bytes -= num_bytes
            self._durable = frames[-1].sequence
            self._changed.notify_all()

    def _take(self) -> list[QueuedFrame]:
        count = size = 0
        while count < len(self._queue):
            size += self._queue[count].num_bytes
            if count and size > _ROOM:
                break
            count += 1
        taken, self._queue = self._queue[:count], self._queue[count:]
        return taken

    async def _try_write(self, frames: Sequence[QueuedFrame]) -> None:
        try:
            await asyncio.to_thread(self._write_segment, frames)
        except StoreError:
            async with self._changed:
                self.is_away = True
                self._changed.notify_all()
            raise
        self.is_away = False

    def _write_segment(self, frames: Sequence[QueuedFrame]) -> None:
        first = frames[0].sequence
        encoded = [frame.encode() for frame in frames]
        data = segments.encode_segment(self.owner, self.epoch, first=first, frames=encoded)
        _create(self.store, segment_key(self.prefix, self.epoch, first), data)
        # A successor claims its epoch before it reads this log. A segment written before the claim
        # is read by it, and a later one is never acknowledged.
        if self.is_fenced():
            raise FencedError(f"epoch {self.epoch + 1} was opened: this writer stops")


def _create(store: Store, key: str, data: bytes) -> None:
    try:
        store.create(key, data)
    except ExistsError:
        # A create whose reply was lost took effect; anything else is another writer.
        if store.get(key) != data:
            raise FencedError(f"{store.url}/{key}: another writer of this log") from None
