"""Numbers below 2^21 in up to 3 bytes: 7 bits each, low ones first, the high bit means more."""

from etude.common.errors import CorruptError

_BYTES = 3


def put_varint(out: bytearray, value: int) -> None:
    """Append a number in its shortest form."""
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def take_varint(data: memoryview, at: int, *, where: str) -> tuple[int, int]:
    """The number that starts at a byte, and where it ends.

    Raises:
        CorruptError: cut off, longer than 3 bytes, or not the shortest form.
    """
    value = 0
    for place in range(_BYTES):
        if at + place >= len(data):
            raise CorruptError(f"{where}: ends inside a number")
        octet = data[at + place]
        value |= (octet & 127) << (7 * place)
        if octet < 128:
            if place and not octet:
                raise CorruptError(f"{where}: a number that is not in its shortest form")
            return value, at + place + 1
    raise CorruptError(f"{where}: a number of more than {_BYTES} bytes")
