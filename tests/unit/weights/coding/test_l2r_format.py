"""An L2r payload read by a second decoder, from the text of its format, with Python's integers."""

import hashlib
import math

import numpy as np
import pytest

from etude.common.weights.coding.codecs import chances, l2
from etude.common.weights.tensors.changes import BlockChanges

FALL = [round(4096 * math.exp(-j / 256)) for j in range(193)]


class Coder:
    def __init__(self, payload):
        words = [int.from_bytes(payload[i : i + 2], "little") for i in range(0, len(payload), 2)]
        self.x, self.words = words[0] << 16 | words[1], words[2:]

    def symbol(self, start, freq, bits):
        self.x = freq * (self.x >> bits) + self.x % (1 << bits) - start
        if self.x < 65536:
            self.x = self.x << 16 | self.words.pop(0)

    def bit(self, chance):
        one = self.x % 4096 < chance
        self.symbol(*((0, chance, 12) if one else (chance, 4096 - chance, 12)))
        return int(one)

    def even(self, bits):
        if bits > 16:
            return self.even(16) + (self.even(bits - 16) << 16)
        value = self.x % (1 << bits)
        self.symbol(value, 1, bits)
        return value

    def adaptive(self, row, place):
        chance, seen = row[place] & 65535, row[place] >> 16
        bit = self.bit(min(max(chance >> 4, 1), 4095))
        rate = 131072 // (2 * seen + 3)
        chance += (65535 - chance) * rate >> 16 if bit else -(chance * rate >> 16)
        row[place] = chance | min(seen + 1, 127) << 16
        return bit


def level(changed, size):
    same = size - changed + 1
    if changed >= same:
        return min((changed // same).bit_length() + 7, 15)
    return max(8 - ((same - 1) // changed).bit_length(), 0)


def passing(left, size):
    """Bits of a run, and the chance that it has no change."""
    b = max([b for b in range(20) if left << (b + 1) <= size], default=0)
    if b == 0 or left == 1:
        chance = 4096 * (size - (left << b)) // size
    else:
        mean = (left << (b + 8)) // size
        chance = FALL[mean + mean * mean // (512 * left)]
    return b, min(max(chance, 1), 4095)


def count_of(coder, mean):
    k = (mean.bit_length() + 1) // 2
    quotient = 0
    while quotient < 24 and coder.bit(2048):
        quotient += 1
    z = coder.even(19) if quotient == 24 else (quotient << k) + coder.even(k)
    return mean + z // 2 if z % 2 == 0 else mean - (z + 1) // 2


def gap_of(coder, left, size):
    gap = 0
    b, chance = passing(left, size)
    while coder.bit(chance):
        gap += 1 << b
        if left < 8:
            b, chance = passing(left, size - gap)
    return gap + coder.even(b)


def distance_of(coder, wider, upper, word_bits):
    bits = 0
    while bits < word_bits - 1 and coder.adaptive(wider, bits):
        bits += 1
    if not bits:
        return 1
    return (2 + coder.adaptive(upper, bits) << (bits - 1)) + coder.even(bits - 1)


def counts_and_changes(coder, sizes, changed, word_bits):
    """(class, rank, distance or signed difference) of all changes."""
    rows = [[int(state) for state in row] for row in chances.initial()]
    a, b = 48, 16
    found: list[tuple[int, int, int]] = []
    for c, size in enumerate(sizes):
        remaining, later = changed - len(found), sum(sizes[c + 1 :])
        low, high = max(0, remaining - later), min(size, remaining)
        mean = min(max(size * a // max(a + b, 1), low), high)
        count = count_of(coder, mean) if low < high else low
        a, b = a + 16 * count, b + 16 * (size - count)
        a, b = ((a * (a + b) + 1) // (3 * a + 2 * b + 1) + 2) // 4, (b + 2) // 4
        rank, left_over = -1, size
        for left in range(count, 0, -1):
            gap = gap_of(coder, left, left_over)
            rank, left_over = rank + gap + 1, left_over - gap - 1
            d = distance_of(coder, rows[level(count, size)], rows[16], word_bits)
            if len(found) < changed - 16 and coder.even(1):
                d = -d
            found.append((c, rank, d))
    return found


@pytest.mark.parametrize("density", [0.0005, 0.01, 0.2, 0.97])
def test_a_stream_reads_as_its_format_says(density):
    rng = np.random.default_rng(11)
    exact = (rng.standard_normal(20_000) * 0.02).astype(np.float32)
    old = (exact.view(np.uint32) >> 16).astype(np.uint16)
    exponents = (old >> 7 & 0xFF).astype(int)
    chance = density * 2.0 ** (120 - exponents)
    index = np.flatnonzero(rng.random(old.size) < chance).astype(np.uint32)
    delta = np.where(rng.random(index.size) < 0.5, 1, -1) * (
        1 + rng.geometric(0.5 / (1 + chance[index])) // 2
    )
    delta[rng.random(index.size) < 0.01] = -32768
    changes = BlockChanges(index, delta.astype("<u2"))
    payload = l2.encode(old, changes, dtype="BF16", what="rans").payload

    first = max(0, sorted(exponents)[(old.size - 1) // 2] - 14)
    members = np.clip(exponents - first, 0, 23)
    coder = Coder(payload)
    found = counts_and_changes(
        coder, np.bincount(members, minlength=24).tolist(), index.size, word_bits=16
    )
    assert not coder.words
    for j in range(min(16, len(found))):
        c, rank, d = found[-1 - j]
        found[-1 - j] = (c, rank, -d if coder.x - 65536 >> j & 1 else d)
    places = [np.flatnonzero(members == c) for c in range(24)]
    read = sorted((int(places[c][rank]), d % 65536) for c, rank, d in found)
    assert read == list(zip(index.tolist(), changes.delta.tolist(), strict=True))


@pytest.mark.parametrize(
    ("what", "digest"),
    [("rice", "537436815bf15f9a"), ("rans", "a20ca82a366adaa7")],
)
def test_the_bytes_of_a_tile_are_those_of_every_release(what, digest):
    """Stored versions outlive the program that wrote them."""
    place = np.arange(50_000, dtype=np.int64)
    old = (0x3C00 - (place * 40503 % 65536 >> 5) % 1500 | (place & 1) << 15).astype("<u2")
    index = np.flatnonzero(place * 2654435761 % (1 << 32) < 1 << 26).astype(np.uint32)
    place = place[index]
    delta = np.where(place % 3 == 0, -1 - place % 5, 1 + (place % 50 == 1) * 900)
    changes = BlockChanges(index, delta.astype("<u2"))
    payload = l2.encode(old, changes, dtype="BF16", what=what).payload
    assert hashlib.sha256(payload).hexdigest()[:16] == digest
