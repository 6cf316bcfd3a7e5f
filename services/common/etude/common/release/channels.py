"""Channels: create-only records of the version that a channel serves; the newest one counts.

    channels/<channel>/<number:012d>.json     ChannelRecord; numbers from 1, without a gap

Engines and gateways follow the records alone: while nothing is written, everything
goes on as it is. A roll-back is one more record.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, InvalidFieldError
from etude.common.experiments.assignment import MAX_SHARE
from etude.common.weights import VersionId
from etude.common.weights.protocol import records
from etude.common.weights.protocol.versions import MAX_EPOCH, MAX_NUMBER

CHANNELS = "channels/"
STABLE = "stable"
CANARY = "canary"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DIGITS = re.compile(r"[0-9]{12}")

MAX_SENTENCE = 1_024
Sentence = Annotated[str, Field(max_length=MAX_SENTENCE)]


class ServedVersion(BaseModel):
    """A version of a run's weights."""

    model_config = records.STRICT

    run_uid: Annotated[str, Field(min_length=1, max_length=128)]
    epoch: Annotated[int, Field(ge=1, le=MAX_EPOCH)]
    number: Annotated[int, Field(ge=0, le=MAX_NUMBER)]
    checkpoint: Annotated[str, Field(max_length=253)] = ""
    """Name of the Checkpoint object with this version; empty without one."""

    @property
    def version(self) -> VersionId:
        return VersionId(self.epoch, self.number)

    def is_same(self, other: "ServedVersion | None") -> bool:
        """Return true if both are one version; people name one without its Checkpoint."""
        if other is None:
            return False
        return (self.run_uid, self.version) == (other.run_uid, other.version)


class ChannelExperiment(BaseModel):
    """Comparison of the canary channel with the stable one, as gateways assign users to it."""

    model_config = records.STRICT

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    salt: Annotated[str, Field(min_length=1, max_length=64)]
    share: Annotated[int, Field(ge=0, le=MAX_SHARE)]
    """Users with the canary, in 10,000ths of all; as many are the control."""


class ChannelRecord(BaseModel):
    """One decision about a channel."""

    model_config = records.STRICT

    format: Literal[1] = 1
    channel: str
    number: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    served: ServedVersion | None
    """None: the channel serves nothing; users of its arm get the stable channel."""
    experiment: ChannelExperiment | None = None
    """Of the canary channel while it has users."""
    action: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z]{0,63}$")]
    """Such as Promote or Rollback."""
    sentence: Sentence
    """Why, for people, with its figures."""
    evidence: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Digest of the evidence object."""
    decided_ms: Annotated[int, Field(ge=0)]


def channel_key(channel: str, number: int) -> str:
    """Key of one record.

    Raises:
        InvalidFieldError: the channel has no usable name.
    """
    return f"{_prefix(channel)}{number:012d}.json"


def append_record(store: Store, record: ChannelRecord) -> ChannelRecord:
    """Append a decision; return the record that has its number now: this, or another writer's.

    Raises:
        StoreError: the store did not answer; call again.
    """
    key = channel_key(record.channel, record.number)
    data = records.create_once(store, key, records.to_bytes(record))
    return _parse(record.channel, record.number, data, where=f"{store.url}/{key}")


def read_record(store: Store, channel: str, number: int) -> ChannelRecord:
    """Read one record of a channel.

    Raises:
        CorruptError: it is damaged.
        MissingError: there is none with this number.
        StoreError: the store did not answer.
    """
    key = channel_key(channel, number)
    return _parse(channel, number, records.fetch(store, key), where=f"{store.url}/{key}")


def newest_record(store: Store, channel: str, *, known: int = 0) -> ChannelRecord | None:
    """The newest record of a channel; None if there is none behind the known number.

    Raises:
        CorruptError: it is damaged.
        StoreError: the store did not answer.
    """
    numbers = _list_numbers(store, channel, known=known)
    return read_record(store, channel, numbers[0]) if numbers else None


def find_readable_records(store: Store, channel: str) -> Iterator[ChannelRecord]:
    """Find the records of a channel that are not damaged, newest first.

    Raises:
        StoreError: the store did not answer.
    """
    for number in _list_numbers(store, channel):
        with contextlib.suppress(CorruptError, MissingError):
            yield read_record(store, channel, number)


def retained_versions(store: Store, run_uid: str) -> frozenset[VersionId]:
    """Versions of a run that must stay readable: the last two that each channel named.

    They are the served one, and the one that a roll-back returns to. Records that cannot be read
    are passed over: no engine can follow them either.

    Raises:
        StoreError: the store did not answer.
    """
    numbers: dict[str, list[int]] = {}
    for info in store.list(CHANNELS):
        channel, _, name = info.key.removeprefix(CHANNELS).partition("/")
        digits = name.removesuffix(".json")
        if _NAME.fullmatch(channel) and _DIGITS.fullmatch(digits):
            numbers.setdefault(channel, []).append(int(digits))
    retained: frozenset[VersionId] = frozenset()
    for channel, found in numbers.items():
        retained |= _last_two(store, channel, sorted(found, reverse=True), run_uid)
    return retained


def _last_two(
    store: Store, channel: str, numbers: Sequence[int], run_uid: str
) -> frozenset[VersionId]:
    versions: set[VersionId] = set()
    for number in numbers:
        try:
            served = read_record(store, channel, number).served
        except (CorruptError, MissingError):
            continue
        if served is not None and served.run_uid == run_uid:
            versions.add(served.version)
        if len(versions) == 2:
            break
    return frozenset(versions)


def _list_numbers(store: Store, channel: str, *, known: int = 0) -> list[int]:
    """Numbers of the records behind a known one, newest first."""
    prefix = _prefix(channel)
    after = channel_key(channel, known) if known else ""
    names = (
        info.key.removeprefix(prefix).removesuffix(".json")
        for info in store.list(prefix, after=after)
    )
    return sorted((int(text) for text in names if _DIGITS.fullmatch(text)), reverse=True)


def _parse(channel: str, number: int, data: bytes, *, where: str) -> ChannelRecord:
    record = records.parse(ChannelRecord, data, where=where)
    if (record.channel, record.number) != (channel, number):
        raise CorruptError(f"{where}: holds record {record.number} of {record.channel!r}")
    return record


def _prefix(channel: str) -> str:
    if not _NAME.fullmatch(channel):
        raise InvalidFieldError("channel", f"{channel[:64]!r} is no name of a channel")
    return f"{CHANNELS}{channel}/"
