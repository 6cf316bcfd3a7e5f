"""L2 and L2r give back every change, in one encoding, and refuse what is none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs import classes, l2
from etude.common.weights.tensors import changes as changes_of
from etude.common.weights.tensors.changes import BlockChanges
from etude.common.weights.tensors.tiles import TILE_ELEMENTS
from etude.common.weights.tensors.words import ORDERED, word_type

DTYPES = ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "U8", "I16", "U32"]
WHAT = ["rice", "rans"]


def round_trip(old, changes, dtype, what):
    encoded = l2.encode(old, changes, dtype=dtype, what=what)
    decoded = decode(encoded.payload, old, changes.index.size, dtype, what)
    assert np.array_equal(decoded.index, changes.index)
    assert np.array_equal(decoded.delta, changes.delta)
    assert decoded.index.dtype == np.uint32
    assert decoded.delta.dtype == old.dtype
    return encoded.payload


def decode(payload, old, changed, dtype, what):
    return l2.decode(
        payload, old, changed=changed, flags=0, dtype=dtype, where="block 3", what=what
    )


def random_tile(rng, dtype, elements, density):
    """Any bit patterns, any differences: nothing like a model."""
    word = word_type(dtype)
    old = rng.integers(0, 256, elements * word.itemsize, np.uint8).view(word)
    index = np.flatnonzero(rng.random(elements) < density).astype(np.uint32)
    delta = rng.integers(1, 256 ** int(word.itemsize), index.size).astype(word)
    small = rng.random(index.size) < 0.7
    delta[small] = rng.choice([1, 256 ** int(word.itemsize) - 1], small.sum()).astype(word)
    return old, BlockChanges(index, delta)


def step_of_a_model(rng, elements, size=1e-4):
    """bf16 weights around 0.02 and an update of about one size, rounded from inside their cells."""
    exact = (rng.standard_normal(elements) * 0.02).astype(np.float32)
    moved = exact + (rng.standard_normal(elements) * size).astype(np.float32)
    old, new = ((x.view(np.uint32) + 0x8000 >> 16).astype("<u2") for x in (exact, moved))
    return old, changes_of.diff_words(old, new, ordered=True)


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3000), st.sampled_from([0.0, 0.01, 0.3, 0.95, 1.0]))
def test_any_changes_of_any_words_come_back(dtype, what, seed, elements, density):
    old, changes = random_tile(np.random.default_rng(seed), dtype, elements, density)
    round_trip(old, changes, dtype, what)


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("place", [0, 1, 998, 999])
def test_one_change_comes_back_from_either_end(what, place):
    old = np.random.default_rng(1).integers(0, 65536, 1000, np.uint16)
    for d in (1, -1, 127, -127, 128, -128, 32767, -32768):
        delta = np.array([d % 65536], np.uint16)
        round_trip(old, BlockChanges(np.array([place], np.uint32), delta), "BF16", what)


@pytest.mark.parametrize("what", WHAT)
def test_zeros_infinities_and_nan_payloads_come_back(what):
    special = [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7FFF, 0x007F]
    old = np.array([u for u in special for _ in special], "<u2")
    new = np.array(special * len(special), "<u2")
    changes = changes_of.diff_words(old, new, ordered=True)
    payload = round_trip(old, changes, "BF16", what)
    decoded = decode(payload, old, changes.index.size, "BF16", what)
    assert changes_of.apply_changes(old, decoded, ordered=True).tobytes() == new.tobytes()


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("density", [0.00001, 0.002, 0.9, 1.0])
def test_a_whole_tile_comes_back(what, density):
    rng = np.random.default_rng(5)
    for dtype in ("BF16", "F32", "U8"):
        old, changes = random_tile(rng, dtype, TILE_ELEMENTS, density)
        round_trip(old, changes, dtype, what)


@pytest.mark.parametrize("what", WHAT)
def test_no_change_is_no_byte(what):
    old = np.arange(100, dtype="<u2")
    nothing = BlockChanges(np.empty(0, np.uint32), np.empty(0, "<u2"))
    assert round_trip(old, nothing, "BF16", what) == b""
    with pytest.raises(CorruptError, match="without a change"):
        decode(b"\0\0", old, 0, "BF16", what)


def test_sizes_are_close_to_what_perfect_contexts_would_need():
    old, changes = step_of_a_model(np.random.default_rng(2), TILE_ELEMENTS, 2e-6)
    exponents = old >> 7 & 0xFF
    bits = 0.0
    for e in np.unique(exponents[changes.index]):
        deltas = changes.delta[exponents[changes.index] == e]
        n, k = np.count_nonzero(exponents == e), deltas.size
        for part, whole in ((k, n), (n - k, n)):
            bits -= part * np.log2(part / whole) if part else 0
        counts = np.unique(deltas, return_counts=True)[1]
        bits -= (counts * np.log2(counts / k)).sum()
    rice = 8 * len(l2.encode(old, changes, dtype="BF16", what="rice").payload)
    rans = 8 * len(l2.encode(old, changes, dtype="BF16", what="rans").payload)
    assert 0.98 * bits < rans < 1.04 * bits
    assert rans < rice < 1.25 * bits


class Reader:
    """Bytes and bits as the text of the L2 format says, with Python's integers."""

    def __init__(self, payload):
        self.payload, self.at, self.bits = payload, 0, 0

    def octet(self):
        self.at += 1
        return self.payload[self.at - 1]

    def varint(self):
        octet = self.octet()
        return octet if octet < 128 else octet - 128 + 128 * self.varint()

    def open_stream(self, length):
        self.bits = int.from_bytes(self.payload[self.at : self.at + length], "little")
        self.at += length

    def take(self, n):
        value = self.bits & ((1 << n) - 1)
        self.bits >>= n
        return value

    def rice(self, parameter):
        quotient = 0
        while quotient < 24 and self.take(1):
            quotient += 1
        if quotient == 24:
            return self.take(32)
        return (quotient << parameter) + self.take(parameter)


def test_a_rice_payload_reads_as_its_format_says():
    old, changes = step_of_a_model(np.random.default_rng(3), 20_000)
    reader = Reader(l2.encode(old, changes, dtype="BF16", what="rice").payload)
    exponents = (old >> 7 & 0xFF).astype(int)
    first = reader.octet()
    assert first == max(0, sorted(exponents)[(old.size - 1) // 2] - 14)
    mask = sum(reader.octet() << shift for shift in (0, 8, 16))
    present = [c for c in range(24) if mask >> c & 1]
    headers = [(reader.varint(), *divmod(reader.octet(), 15), reader.varint()) for _ in present]
    found = {}
    for c, (count, k, a, length) in zip(present, headers, strict=True):
        reader.open_stream(length)
        places = np.flatnonzero(np.clip(exponents - first, 0, 23) == c)
        rank = -1
        for _ in range(count):
            rank += reader.rice(k) + 1
            sign = -1 if reader.take(1) else 1
            found[int(places[rank])] = sign * (reader.rice(a) + 1) % 65536
        assert reader.bits == 0
    assert reader.at == len(reader.payload)
    assert sorted(found.items()) == list(
        zip(changes.index.tolist(), changes.delta.tolist(), strict=True)
    )


@pytest.mark.parametrize("what", WHAT)
def test_a_payload_cut_anywhere_is_refused(what):
    old, changes = step_of_a_model(np.random.default_rng(4), 5000)
    payload = l2.encode(old, changes, dtype="BF16", what=what).payload
    for length in range(len(payload)):
        with pytest.raises(CorruptError, match="block 3"):
            decode(payload[:length], old, changes.index.size, "BF16", what)
    with pytest.raises(CorruptError, match="block 3"):
        decode(payload + b"\0\0", old, changes.index.size, "BF16", what)


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F32"])
def test_a_flipped_bit_is_refused_or_is_another_encoding(what, dtype):
    rng = np.random.default_rng(6)
    old, changes = random_tile(rng, dtype, 2000, 0.1)
    payload = l2.encode(old, changes, dtype=dtype, what=what).payload
    refused = 0
    for bit in rng.integers(0, 8 * len(payload), 2000):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << (bit % 8)
        try:
            decoded = decode(bytes(damaged), old, changes.index.size, dtype, what)
        except CorruptError:
            refused += 1
            continue
        well_formed(old, decoded)
        if bit >= 8 or what == "rans":
            # Every payload that is read is the only one of its changes (but for e0 of L2).
            assert l2.encode(old, decoded, dtype=dtype, what=what).payload == bytes(damaged)
    assert refused


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 2**32))
def test_noise_is_refused_or_well_formed(dtype, what, noise, changed, seed):
    old, _ = random_tile(np.random.default_rng(seed), dtype, 400, 0)
    try:
        decoded = decode(noise, old, changed, dtype, what)
    except CorruptError:
        return
    well_formed(old, decoded)


def well_formed(old, changes):
    assert (np.diff(changes.index.astype(np.int64)) > 0).all()
    assert not changes.index.size or changes.index[-1] < old.size
    assert (changes.delta != 0).all()


@pytest.mark.parametrize("what", WHAT)
def test_another_number_of_changes_is_refused(what):
    old, changes = step_of_a_model(np.random.default_rng(7), 5000)
    payload = l2.encode(old, changes, dtype="BF16", what=what).payload
    for changed in (changes.index.size - 1, changes.index.size + 1, 0, 5001, -1):
        with pytest.raises(CorruptError, match="block 3"):
            decode(payload, old, changed, "BF16", what)


def test_flags_are_refused():
    with pytest.raises(CorruptError, match="flags"):
        l2.decode(
            b"",
            np.zeros(1, "<u2"),
            changed=0,
            flags=1,
            dtype="BF16",
            where="block 3",
            what="rice",
        )


@pytest.mark.parametrize(
    ("index", "delta"), [([1, 1], [1, 1]), ([2, 1], [1, 1]), ([1, 9], [1, 1]), ([1, 2], [1, 0])]
)
def test_changes_that_are_none_are_not_encoded(index, delta):
    changes = BlockChanges(np.array(index, np.uint32), np.array(delta, "<u2"))
    with pytest.raises(ValueError, match="increasing"):
        l2.encode(np.zeros(9, "<u2"), changes, dtype="BF16", what="rans")


@pytest.mark.parametrize("old", [np.zeros(TILE_ELEMENTS + 1, "<u2"), np.zeros(8, "<u8")])
def test_what_is_no_tile_is_not_coded(old):
    changes = BlockChanges(np.array([1], np.uint32), np.array([1], old.dtype))
    with pytest.raises(ValueError, match="no tile"):
        l2.encode(old, changes, dtype="BF16", what="rice")
    with pytest.raises(CorruptError, match="block 3: codec"):
        decode(b"", old, 0, "BF16", "rice")


@pytest.mark.parametrize("dtype", DTYPES)
def test_classes_follow_the_exponent_of_ordered_formats_alone(dtype):
    word = word_type(dtype)
    old = np.random.default_rng(8).integers(0, 256, 4096 * word.itemsize, np.uint8).view(word)
    parts = classes.partition(old, dtype)
    assert parts.sizes.tolist() == np.bincount(parts.members, minlength=24).tolist()
    if dtype not in ORDERED:
        assert not parts.members.any()
        return
    bits = {"BF16": 8, "F16": 5, "F32": 8, "F8_E4M3": 4, "F8_E5M2": 5}[dtype]
    exponents = old.astype(np.int64) >> (8 * word.itemsize - 1 - bits) & (1 << bits) - 1
    first = max(0, sorted(exponents)[old.size // 2 - 1] - 14)
    assert parts.first == first
    assert np.array_equal(parts.members, np.clip(exponents - first, 0, 23))
