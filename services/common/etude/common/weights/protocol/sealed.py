"""Small JSON objects that carry a digest of themselves, so that no flipped bit is believed."""

import json
from collections.abc import Mapping

from blake3 import blake3
from pydantic import JsonValue

from etude.common.errors import CorruptError

MAX_BYTES = 16 << 20
"""Also the limit of a create-only put."""

SEAL = "blake3"


def seal(body: Mapping[str, JsonValue]) -> bytes:
    """Canonical JSON of the body with its digest as one more field.

    The same body always gives the same bytes, so that a repeated create can be recognised.
    """
    return _canonical({**body, SEAL: blake3(_canonical(body)).hexdigest()})


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
