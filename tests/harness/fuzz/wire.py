"""Damage to protobuf messages that keeps them close to messages."""

import random
from typing import NamedTuple

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_NUMBERS = (0, 1, 2, 127, 128, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1)
_BLOBS = (b"", b"\0", b"..", b"/", b"\xff", b"\xed\xa0\x80", b"a\0b", b"x" * 300, b"{" * 40)
_MAX_DEPTH = 3


class Field(NamedTuple):
    """One field as it is on the wire."""

    number: int
    kind: int
    value: bytes
    """Of a varint, all of its bytes; of bytes, without their length."""


def varint(number: int) -> bytes:
    """A number in seven bits at a time."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def fields(data: bytes) -> list[Field] | None:
    """The fields of a message; None if it is none."""
    found, at = [], 0
    while at < len(data):
        tag, at = _number(data, at)
        start = at
        if tag & 7 == _VARINT:
            _, at = _number(data, at)
        elif tag & 7 == _BYTES:
            length, start = _number(data, at)
            at = start + length
        elif tag & 7 in _FIXED:
            at += _FIXED[tag & 7]
        else:
            return None
        if at > len(data) or tag < 8:
            return None
        found.append(Field(tag >> 3, tag & 7, data[start:at]))
    return found


def encoded(message: list[Field]) -> bytes:
    """The bytes of these fields."""
    out = bytearray()
    for field in message:
        out += varint(field.number << 3 | field.kind)
        out += varint(len(field.value)) if field.kind == _BYTES else b""
        out += field.value
    return bytes(out)


def damaged(data: bytes, chance: random.Random, depth: int = 0) -> bytes:
    """A message like this one, with something in it that nobody expects."""
    message = fields(data)
    if not message or depth >= _MAX_DEPTH or chance.random() < 0.1:
        return scrambled(data, chance)
    at = chance.randrange(len(message))
    match chance.randrange(6):
        case 0:
            del message[at]
        case 1:
            message.insert(at, chance.choice(message))
        case 2:
            message[at] = message[at]._replace(number=chance.randrange(1, 30))
        case 3:
            message[at] = Field(message[at].number, _VARINT, varint(chance.choice(_NUMBERS)))
        case _:
            message[at] = _changed(message[at], chance, depth)
    return encoded(message)


def scrambled(data: bytes, chance: random.Random) -> bytes:
    """Bytes like these, of which some are others, missing or too many."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(5):
            case 0:
                out[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del out[at : at + chance.choice((1, 2, 9, 100))]
            case 2:
                out[at:at] = chance.randbytes(chance.choice((1, 2, 9, 100)))
            case 3:
                out[at : at + 4] = chance.choice(_NUMBERS[:9]).to_bytes(4, "little")
            case _:
                out[at : at + 1] = bytes([(out[at] if at < len(out) else 0) ^ 1 << at % 8])
    return bytes(out)


def _changed(field: Field, chance: random.Random, depth: int) -> Field:
    if field.kind == _VARINT:
        return field._replace(value=varint(chance.choice(_NUMBERS)))
    if field.kind != _BYTES:
        return field._replace(value=chance.randbytes(len(field.value)))
    if chance.random() < 0.3:
        return field._replace(value=chance.choice(_BLOBS))
    return field._replace(value=damaged(field.value, chance, depth + 1))


def _number(data: bytes, at: int) -> tuple[int, int]:
    """The number there and where the next thing is; a number that never ends lies outside."""
    number = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    return 0, len(data) + 1
