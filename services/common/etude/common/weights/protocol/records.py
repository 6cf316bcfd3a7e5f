"""Sealed records: bounded, strictly typed JSON objects with a digest, created once."""

import json
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from etude.common.blobs import ExistsError, MissingError, Store
from etude.common.errors import CorruptError, StoreError
from etude.common.weights.protocol import sealed

_Model = TypeVar("_Model", bound=BaseModel)

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
"""What every record is: unknown fields and converted types are refused."""


def to_bytes(record: BaseModel) -> bytes:
    """A record as it is stored; equal records give equal bytes."""
    return sealed.seal(record.model_dump(mode="json"))


def parse(model: type[_Model], data: bytes, *, where: str) -> _Model:
    """The record that was sealed.

    Raises:
        CorruptError: damaged, or a field is not what it must be.
    """
    try:
        # Strict models take tuples from JSON text only.
        return model.model_validate_json(json.dumps(sealed.unseal(data, where=where)))
    except ValidationError as cause:
        raise CorruptError(f"{where}: {cause}") from cause


def fetch(store: Store, key: str) -> bytes:
    """A small object, whose size is looked at before it is read.

    Raises:
        MissingError: no object has this key.
        CorruptError: it is larger than any record.
    """
    found = store.head(key)
    if found is None:
        raise MissingError(f"{store.url}/{key}: missing")
    if found.size > sealed.MAX_BYTES:
        raise CorruptError(f"{store.url}/{key}: {found.size} bytes, more than {sealed.MAX_BYTES}")
    return store.get(key)


def create_once(store: Store, key: str, data: bytes) -> bytes:
    """Create an object, or find out what already has its key.

    A create whose reply was lost, or that the client retried, counts by what is in the store
    afterwards.

    Returns:
        What is stored under the key now: `data`, or what another wrote there first.

    Raises:
        StoreError: nothing is there; call again.
    """
    try:
        store.create(key, data)
    except ExistsError as cause:
        try:
            return fetch(store, key)
        except MissingError:
            raise StoreError(f"{store.url}/{key}: was there, and is gone") from cause
    except StoreError as cause:
        try:
            return fetch(store, key)
        except MissingError:
            raise cause from None
    return data
