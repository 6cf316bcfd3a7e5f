"""Tombstones: keys that a garbage collector is about to delete, written before its last check."""

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field, StringConstraints, model_validator

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError
from etude.common.weights.protocol import records
from etude.common.weights.protocol.versions import (
    MAX_EPOCH,
    TRASH,
    parse_delta_key,
    parse_keyframe_key,
    parse_manifest_key,
    parse_skip_key,
)

MAX_KEYS = 50_000
"""Of one tombstone, so that it stays far below the limit of a create."""

_KEY = re.compile(re.escape(TRASH) + r"([0-9a-f]{32})\.json")


class Tombstone(BaseModel):
    """Keys that no reader may rely on any more."""

    model_config = records.STRICT

    format: Literal[1] = 1
    id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    epoch: int = Field(ge=1, le=MAX_EPOCH)
    """Of the collector."""
    keys: tuple[Annotated[str, StringConstraints(max_length=256)], ...] = Field(
        min_length=1, max_length=MAX_KEYS
    )
    """In the order of deletion."""

    @model_validator(mode="after")
    def _ours(self) -> "Tombstone":
        parsers = (parse_manifest_key, parse_delta_key, parse_skip_key, parse_keyframe_key)
        for key in self.keys:
            if not any(parse(key) for parse in parsers):
                raise ValueError(f"keys: {key!r} is nothing that may be deleted")
        return self

    @property
    def key(self) -> str:
        return f"{TRASH}{self.id}.json"


def write_tombstone(store: Store, tombstone: Tombstone) -> None:
    """Announce a deletion.

    Raises:
        StoreError: the store failed; the tombstone may be there nevertheless.
    """
    records.create_once(store, tombstone.key, records.to_bytes(tombstone))


class Trash(NamedTuple):
    """Deletions in progress."""

    tombstones: list[Tombstone]
    """Announced deletions that are not known to be over."""
    damaged: list[str]
    """Keys of tombstones that cannot be read."""

    @property
    def keys(self) -> frozenset[str]:
        """Everything that may be gone at any moment: readers and openers go around it."""
        return frozenset(key for each in self.tombstones for key in each.keys)


def read_trash(store: Store) -> Trash:
    """Every announced deletion."""
    found = Trash([], [])
    for info in store.list(TRASH):
        named = _KEY.fullmatch(info.key)
        if named is None:
            continue
        where = f"{store.url}/{info.key}"
        try:
            each = records.parse(Tombstone, records.fetch(store, info.key), where=where)
        except MissingError:  # the deletion is over, and what it named is gone
            continue
        except CorruptError:
            found.damaged.append(info.key)
            continue
        if each.key == info.key:
            found.tombstones.append(each)
        else:
            found.damaged.append(info.key)
    return found
