"""Sealed records: bounded, strictly typed JSON objects with a digest, created once."""

import json
from collections.abc import Mapping
from typing import TypeVar

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from etude.common.blobs import ExistsError, MissingError, Store
from etude.common.errors import CorruptError, InvalidFieldError, StoreError

MAX_BYTES = 16 << 20
"""Also the limit of a create-only put."""

SEAL = "blake3"


def seal(body: Mapping[str, JsonValue], *, name: str = "record") -> bytes:
    """Canonical JSON of the body with its digest as one more field.

    The same body always gives the same bytes, so that a repeated create can be recognised.

    Raises:
        InvalidFieldError: it is larger than unseal() takes; the name is part of the message.
    """
    data = _canonical({**body, SEAL: blake3(_canonical(body)).hexdigest()})
    if len(data) > MAX_BYTES:
        raise InvalidFieldError(name, f"takes {len(data)} bytes, more than {MAX_BYTES}")
    return data


def unseal(data: bytes, *, where: str) -> dict[str, JsonValue]:
    """The body that was sealed.

    Raises:
        CorruptError: any byte differs from what seal() wrote.
    """
    if len(data) > MAX_BYTES:
        raise CorruptError(f"{where}: {len(data)} bytes, more than {MAX_BYTES}")
    try:
        body = json.loads(data)
        if not isinstance(body, dict) or not isinstance(body.pop(SEAL, None), str):
            raise CorruptError(f"{where}: no sealed JSON object")
        expected = seal(body)
    except (ValueError, RecursionError) as cause:
        raise CorruptError(f"{where}: no JSON: {cause}") from cause
    if expected != data:
        raise CorruptError(f"{where}: content does not match its digest")
    return body


def _canonical(body: Mapping[str, JsonValue]) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


_Model = TypeVar("_Model", bound=BaseModel)

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
"""What every record is: unknown fields and converted types are refused."""


def to_bytes(record: BaseModel) -> bytes:
    """A record as it is stored; equal records give equal bytes.

    Raises:
        InvalidFieldError: it is larger than parse() takes; its class is named.
    """
    return seal(record.model_dump(mode="json"), name=type(record).__name__)


def parse(model: type[_Model], data: bytes, *, where: str) -> _Model:
    """The record that was sealed.

    Raises:
        CorruptError: damaged, or a field is not what it must be.
    """
    try:
        # Strict models take tuples from JSON text only.
        return model.model_validate_json(json.dumps(unseal(data, where=where)))
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
    if found.size > MAX_BYTES:
        raise CorruptError(f"{store.url}/{key}: {found.size} bytes, more than {MAX_BYTES}")
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
