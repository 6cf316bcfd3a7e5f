"""Epochs: which publisher may extend the chain, decided with create-only puts alone."""

import re
import uuid
from typing import Literal, get_args

from pydantic import BaseModel, Field

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, FencedError, WrongStateError
from etude.common.weights.protocol import records
from etude.common.weights.protocol.versions import (
    EPOCHS,
    MAX_EPOCH,
    MAX_NUMBER,
    VersionId,
    epoch_key,
    list_all_published,
)

Reason = Literal["start", "takeover", "rollback"]

_KEY = re.compile(re.escape(EPOCHS) + r"([0-9]{6})\.json")
_MAX_ATTEMPTS = 16
"""Each lost attempt means that another publisher started; more of them are a broken set-up."""


class EpochRecord(BaseModel):
    """One incarnation of the publisher, and where its chain continues."""

    model_config = records.STRICT

    epoch: int = Field(ge=1, le=MAX_EPOCH)
    parent_epoch: int | None = Field(ge=1, le=MAX_EPOCH)
    parent_number: int | None = Field(ge=0, le=MAX_NUMBER)
    first_number: int = Field(ge=0, le=MAX_NUMBER)
    """Smallest number that this epoch may publish; above every number before it."""
    reason: Reason
    holder: str = Field(max_length=256)
    nonce: str = Field(max_length=64)

    @property
    def parent(self) -> VersionId | None:
        """The newest older version that stays accepted; None starts a new chain."""
        if self.parent_epoch is None or self.parent_number is None:
            return None
        return VersionId(self.parent_epoch, self.parent_number)


def create_epoch(
    store: Store, *, holder: str, parent: VersionId | None, reason: str, after: int | None = None
) -> EpochRecord:
    """Write the record of the next epoch; use claim_epoch(), which looks at the parent too.

    Raises:
        ValueError: the reason is not start, takeover or rollback.
        FencedError: other publishers kept winning, or there is a newer epoch than `after`.
        CorruptError: an epoch's record is damaged, or the parent's is missing.
        WrongStateError: keys can name no further epoch, or no further version.
    """
    if reason not in get_args(Reason):
        raise ValueError(f"reason is {reason!r}, not one of {', '.join(get_args(Reason))}")
    nonce = uuid.uuid4().hex
    for _ in range(_MAX_ATTEMPTS):
        latest = latest_epoch(store)
        if after is not None and (latest is None or latest.epoch != after):
            raise FencedError(f"{store.url}: epoch {after + 1} was opened by another")
        epoch, first_number = _next_numbers(store, latest, parent)
        record = EpochRecord.model_validate(
            {
                "epoch": epoch,
                "parent_epoch": parent.epoch if parent else None,
                "parent_number": parent.number if parent else None,
                "first_number": first_number,
                "reason": reason,
                "holder": holder[:256],
                "nonce": nonce,
            }
        )
        data = records.to_bytes(record)
        # The client may have retried a create whose reply was lost: the nonce tells.
        if records.create_once(store, epoch_key(record.epoch), data) == data:
            return record
    raise FencedError(f"{store.url}: {_MAX_ATTEMPTS} other publishers opened an epoch meanwhile")


def _next_numbers(
    store: Store, latest: EpochRecord | None, parent: VersionId | None
) -> tuple[int, int]:
    """The next epoch and the first number that it may publish.

    Raises:
        CorruptError: the record of the parent's epoch is missing.
        WrongStateError: keys can name no further epoch, or no further version.
    """
    epoch, number = 1 if latest is None else latest.epoch + 1, _first_number(store, latest)
    if parent is not None and parent.epoch >= epoch:
        raise CorruptError(f"{store.url}/{epoch_key(parent.epoch)}: missing; {parent} is of it")
    if epoch > MAX_EPOCH or number > MAX_NUMBER:
        what = f"epoch {MAX_EPOCH}" if epoch > MAX_EPOCH else f"number {MAX_NUMBER}"
        raise WrongStateError(f"{store.url}: no key comes after {what}: start a new run")
    return epoch, number


def _first_number(store: Store, latest: EpochRecord | None) -> int:
    # The record remembers numbers whose manifests were pruned since.
    floor = 0 if latest is None else latest.first_number
    return max([floor, *(version.number + 1 for version in list_all_published(store))])


def epochs_of(store: Store) -> list[int]:
    """Every epoch that has a record, oldest first; foreign objects are skipped."""
    found = (_KEY.fullmatch(info.key) for info in store.list(EPOCHS))
    return [int(each[1]) for each in found if each is not None and int(each[1])]


def stray_keys(store: Store) -> list[str]:
    """Keys among the epochs' records that are no records, such as a copy."""
    known = {epoch_key(epoch) for epoch in epochs_of(store)}
    return [info.key for info in store.list(EPOCHS) if info.key not in known]


def latest_epoch(store: Store) -> EpochRecord | None:
    """The record of the highest epoch; None before the first.

    Raises:
        CorruptError: the record is damaged.
    """
    found = epochs_of(store)
    return read_epoch(store, found[-1]) if found else None


def read_epoch(store: Store, epoch: int) -> EpochRecord:
    """The record of one epoch.

    Raises:
        MissingError: it was never opened.
        CorruptError: the record is damaged.
    """
    where = f"{store.url}/{epoch_key(epoch)}"
    record = records.parse(EpochRecord, records.fetch(store, epoch_key(epoch)), where=where)
    if record.epoch != epoch or (record.parent_epoch is None) != (record.parent_number is None):
        raise CorruptError(f"{where}: the record is of epoch {record.epoch}")
    if record.parent is not None and record.parent.epoch >= epoch:
        raise CorruptError(f"{where}: parent {record.parent} is not older")
    return record


def is_fenced(store: Store, epoch: int) -> bool:
    """Return true if a newer publisher took over; a publisher asks before each publication."""
    return store.head(epoch_key(epoch + 1)) is not None


def epoch_or_none(store: Store, epoch: int) -> EpochRecord | None:
    """The record of one epoch; None if it was never opened."""
    try:
        return read_epoch(store, epoch)
    except MissingError:
        return None
