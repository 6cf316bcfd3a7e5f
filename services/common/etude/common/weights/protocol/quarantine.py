"""Quarantine of damaged versions, and of engine processes with damaged live weights."""

from typing import Literal

from pydantic import BaseModel, Field

from etude.common.blobs import Store
from etude.common.errors import WrongStateError
from etude.common.weights.protocol import records
from etude.common.weights.protocol.versions import (
    MAX_EPOCH,
    MAX_NUMBER,
    QUARANTINE,
    VersionId,
    parse_label,
    quarantine_key,
)

MAX_REASON_CHARS = 1_024


class QuarantinedError(WrongStateError):
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


def quarantined(store: Store) -> frozenset[VersionId]:
    """Every refused version."""
    labels = (
        info.key.removeprefix(QUARANTINE).removesuffix(".json") for info in store.list(QUARANTINE)
    )
    return frozenset(found for found in map(parse_label, labels) if found is not None)
