"""Quarantine of damaged versions, and of engine processes with damaged live weights."""

import re
from typing import Literal

from pydantic import BaseModel, Field

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, WrongStateError
from etude.common.weights.protocol import records
from etude.common.weights.protocol.versions import (
    MAX_EPOCH,
    MAX_NUMBER,
    QUARANTINE,
    SUSPECTS,
    VersionId,
    parse_label,
    quarantine_key,
)

MAX_REASON_CHARS = 1_024


class QuarantinedVersionError(WrongStateError):
    """The version must not be served, nor built upon."""

    reason = "Quarantined"


class QuarantineRecord(BaseModel):
    """Reason for which a version is refused, for people."""

    model_config = records.STRICT

    format: Literal[1] = 1
    epoch: int = Field(ge=1, le=MAX_EPOCH)
    number: int = Field(ge=0, le=MAX_NUMBER)
    reason: str = Field(max_length=MAX_REASON_CHARS)


def quarantine(store: Store, version: VersionId, *, reason: str) -> None:
    """Refuse a version for ever; the first reason stays.

    Raises:
        StoreError: the store failed; call again.
    """
    record = QuarantineRecord(
        epoch=version.epoch, number=version.number, reason=reason[:MAX_REASON_CHARS]
    )
    records.create_once(store, quarantine_key(version), records.to_bytes(record))


def is_quarantined(store: Store, version: VersionId) -> bool:
    """Return true if a version is refused. A damaged record counts: its content is for people."""
    return store.head(quarantine_key(version)) is not None


def list_quarantined(store: Store) -> frozenset[VersionId]:
    """Every refused version."""
    labels = (
        info.key.removeprefix(QUARANTINE).removesuffix(".json") for info in store.list(QUARANTINE)
    )
    return frozenset(found for found in map(parse_label, labels) if found is not None)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Suspect(BaseModel):
    """One engine process, and the version of the last audit that found its memory sound."""

    model_config = records.STRICT

    replica: str = Field(pattern=rf"^{_NAME.pattern}$")
    """As its spans name it: a process, not an address."""
    epoch: int = Field(ge=0, le=MAX_EPOCH)
    number: int = Field(ge=0, le=MAX_NUMBER)
    message: str = Field(max_length=1_024)

    @property
    def since(self) -> VersionId:
        """Samples of this version or a newer one may be wrong.

        The pair 0.0 is before every version: no audit ever found the memory sound.
        """
        return VersionId(self.epoch, self.number)

    @property
    def key(self) -> str:
        return f"{SUSPECTS}{self.replica}.json"


def mark_suspect(store: Store, replica: str, *, since: VersionId, message: str) -> None:
    """Distrust a process for ever; the first record stays.

    Raises:
        StoreError: the store failed; call again.
    """
    record = Suspect(
        replica=replica, epoch=since.epoch, number=since.number, message=message[:1_024]
    )
    records.create_once(store, record.key, records.to_bytes(record))


def list_suspects(store: Store) -> list[Suspect]:
    """Every process that is distrusted.

    A damaged record distrusts all that its process ever sampled.

    Raises:
        StoreError: the store failed.
    """
    found = []
    for info in store.list(SUSPECTS):
        replica = info.key.removeprefix(SUSPECTS).removesuffix(".json")
        if _NAME.fullmatch(replica):
            found.append(_read(store, info.key, replica))
    return found


def _read(store: Store, key: str, replica: str) -> Suspect:
    try:
        data = records.fetch(store, key)
        record = records.parse(Suspect, data, where=f"{store.url}/{key}")
    except (CorruptError, MissingError) as error:
        return Suspect(replica=replica, epoch=0, number=0, message=str(error)[:1_024])
    if record.replica != replica:
        return Suspect(replica=replica, epoch=0, number=0, message=f"{key} is of another process")
    return record
