"""A binary entropy coder: rANS over 16-bit words, whose last state carries 16 bits of payload.

State x in [2^16, 2^32). A symbol is a range [start, start + freq) of 2^bits slots, bits <= 16:

    encode   if x >= freq << (32 - bits): put x mod 2^16, x >>= 16
             x = (x div freq << bits) + x mod freq + start
    decode   s = x mod 2^bits, the symbol whose range holds s
             x = freq * (x >> bits) + s - start;  if x < 2^16: x = x << 16 | next word

Symbols are encoded last to first. The encoder starts from 2^16 + tail, so the decoder ends in just
that state, having used every word: the tail costs nothing. The stream is the encoder's last state,
high word first, then the words in the order in which the decoder takes them. Each sequence of
symbols with its tail has one stream, and every stream that ends so has one sequence.
(J. Duda, "Asymmetric numeral systems", arXiv:1311.2540; F. Giesen, arXiv:1402.3392.)

A bit with a chance c/4096 of being one: slots [0, c) are a one, [c, 4096) a zero. Even bits come in
pieces of 16 at most, low ones first, each a symbol of freq 1 whose start is its value.
"""

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors.jit import compiled

Symbols = npt.NDArray[np.int64]
"""Symbols that wait for the coder: start | freq << 17 | bits << 34."""

Stream = npt.NDArray[np.uint16]
"""What the coder wrote."""

Chances = npt.NDArray[np.uint32]
"""Adaptive bits: chance of a one in 1/65536 | observations << 16, at most 127."""

CERTAIN = 4096
"""Chances of coded bits are this much of one."""

TAIL_BITS = 16

_OBSERVED = 127
RATE = np.array([131072 // (2 * seen + 3) for seen in range(_OBSERVED + 1)], np.int64)
"""Weight of the next observation after so many, in 1/65536."""


@compiled
def chance_of(state: np.uint32) -> int:
    """Chance of a one in 1/4096, never 0 and never 1."""
    return min(max(int(np.int64(state) & 0xFFFF) >> 4, 1), CERTAIN - 1)


@compiled
def adapted(state: np.uint32, bit: int) -> int:
    """An adaptive bit after one more observation."""
    chance = int(np.int64(state) & 0xFFFF)
    seen = int(np.int64(state) >> 16)
    rate = int(RATE[seen])
    if bit:
        chance += ((65535 - chance) * rate) >> 16
    else:
        chance -= (chance * rate) >> 16
    return chance | (min(seen + 1, _OBSERVED) << 16)


@compiled
def put_bit(symbols: Symbols, count: int, bit: int, chance: int) -> int:
    """Append a bit that is one with `chance` 4096ths; the new number of symbols."""
    if bit:
        symbols[count] = (chance << 17) | (12 << 34)
    else:
        symbols[count] = chance | ((CERTAIN - chance) << 17) | (12 << 34)
    return count + 1


@compiled
def put_even(symbols: Symbols, count: int, value: int, bits: int) -> int:
    """Append even bits; the new number of symbols."""
    while bits > 0:
        piece = min(bits, 16)
        symbols[count] = (value & ((1 << piece) - 1)) | (1 << 17) | (piece << 34)
        value >>= piece
        bits -= piece
        count += 1
    return count


@compiled
def write(symbols: Symbols, count: int, tail: int, out: Stream) -> int:
    """Code symbols into the end of `out`, count + 2 long at least; where the stream starts."""
    x = int(np.int64(65536 | tail))
    place = out.size
    for j in range(count - 1, -1, -1):
        start = symbols[j] & 0x1FFFF
        freq = (symbols[j] >> 17) & 0x1FFFF
        bits = symbols[j] >> 34
        if x >= freq << (32 - bits):
            place -= 1
            out[place] = x & 0xFFFF
            x >>= 16
        # Even bits need no division, which is most of the time of a symbol.
        quotient = x if freq == 1 else int(np.int64(np.uint32(x) // np.uint32(freq)))
        x = (quotient << bits) + x - quotient * freq + start
    out[place - 1] = x & 0xFFFF
    out[place - 2] = x >> 16
    return place - 2


@compiled
def refilled(x: int, place: int, stream: Stream) -> tuple[int, int]:
    """State and place after a symbol. Beyond the end zeros follow, and the place tells."""
    if x < 65536:
        x <<= 16
        if place < stream.size:
            x |= int(np.int64(stream[place]))
        place += 1
    return x, place


@compiled
def take_bit(x: int, place: int, stream: Stream, chance: int) -> tuple[int, int, int]:
    """Take a bit that is one with `chance` 4096ths: state, place, bit."""
    slot = x & 4095
    one = slot < chance
    freq = chance if one else CERTAIN - chance
    x = freq * (x >> 12) + (slot if one else slot - chance)
    x, place = refilled(x, place, stream)
    return x, place, 1 if one else 0


@compiled
def take_even(x: int, place: int, stream: Stream, bits: int) -> tuple[int, int, int]:
    """Even bits, 62 at most: state, place, value."""
    value = 0
    shift = 0
    while bits > 0:
        piece = min(bits, 16)
        value |= (x & ((1 << piece) - 1)) << shift
        x, place = refilled(x >> piece, place, stream)
        shift += piece
        bits -= piece
    return x, place, value
