"""The entropy coder is a bijection, and its bytes are as many as the entropy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.weights.coding.codecs import chances, rans

BITS = st.tuples(st.integers(0, 1), st.integers(1, rans.CERTAIN - 1))
EVEN = st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, 2**n - 1), st.just(-n)))


def stream_of(items, tail):
    symbols = np.empty(4 * len(items) + 1, np.int64)
    used = 0
    for value, chance in items:
        if chance > 0:
            used = rans.put_bit(symbols, used, value, chance)
        else:
            used = rans.put_even(symbols, used, value, -chance)
    out = np.empty(used + 2, np.uint16)
    return out[rans.write(symbols, used, tail, out) :]


def encoded_by_big_integers(items, tail):
    """The words of the format's text, with Python's own integers."""
    ranges = []
    for value, chance in items:
        if chance > 0:
            start, freq = (0, chance) if value else (chance, 4096 - chance)
            ranges.append((start, freq, 12))
        else:
            for low in range(0, -chance, 16):
                bits = min(16, -chance - low)
                ranges.append((value >> low & (1 << bits) - 1, 1, bits))
    x, words = 65536 + tail, []
    for start, freq, bits in reversed(ranges):
        if x >= freq << (32 - bits):
            words.append(x % 65536)
            x //= 65536
        x = (x // freq << bits) + x % freq + start
    return [x // 65536, x % 65536, *reversed(words)]


@settings(deadline=None)
@given(st.lists(BITS | EVEN, max_size=200), st.integers(0, 65535))
def test_symbols_and_the_tail_come_back(items, tail):
    stream = stream_of(items, tail)
    assert stream.tolist() == encoded_by_big_integers(items, tail)
    x, place = int(stream[0]) << 16 | int(stream[1]), 2
    for value, chance in items:
        if chance > 0:
            x, place, found = rans.take_bit(x, place, stream, chance)
        else:
            x, place, found = rans.take_even(x, place, stream, -chance)
        assert found == value
    assert (x, place) == (65536 + tail, stream.size)


@pytest.mark.parametrize("chance", [1, 40, 1000, 2048, 4000, 4095])
def test_a_stream_is_as_long_as_its_entropy(chance):
    bits = np.random.default_rng(9).random(20_000) < chance / 4096
    stream = stream_of([(int(bit), chance) for bit in bits], 0)
    entropy = -sum(math.log2(chance / 4096 if bit else 1 - chance / 4096) for bit in bits)
    assert entropy - 16 < 16 * stream.size < 1.01 * entropy + 48


def test_adaptive_bits_approach_the_frequency():
    state = np.uint32(32768)
    bits = np.random.default_rng(10).random(2000) < 0.1
    for bit in bits:
        state = np.uint32(rans.adapted(state, int(bit)))
        assert 0 < rans.chance_of(state) < rans.CERTAIN
    assert rans.chance_of(state) / rans.CERTAIN == pytest.approx(0.1, abs=0.04)


@given(st.integers(1, 262_144), st.integers(0, 1_000_000))
def test_runs_pass_with_the_chance_of_drawing_no_change(size, seed):
    left = 1 + seed % size
    b = chances.run_bits(left, size, seed % 19)
    assert b == 0 or left << (b + 1) <= size
    assert left << (b + 2) > size
    exact = 1.0
    for j in range(1 << b):
        exact *= max(0, size - left - j) / (size - j)
    assert chances.pass_chance(left, size, b) / rans.CERTAIN == pytest.approx(exact, abs=0.05)


@given(st.integers(0, 2**40))
def test_the_width_of_a_number_is_its_bit_length(value):
    assert chances.width_of(value) == value.bit_length()
