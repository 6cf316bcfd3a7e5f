"""L1: what goes in comes out, one encoding per change, and nothing else is believed."""

import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.common.weights import changes
from etude.common.weights.changes import Changes
from etude.common.weights.codecs import l1
from etude.common.weights.codecs.ids import Encoded

Word = type[np.unsignedinteger]
WORDS: list[Word] = [np.uint8, np.uint16, np.uint32, np.uint64]
EDGES = [1, -1, 127, -127, 128, -128, 255, 32767, -32768, 65535, -65535]


def decoded(
    encoded: Encoded, *, elements: int, changed: int, word: Word = np.uint16, flags: int = -1
) -> Changes:
    return l1.decode(
        encoded.payload,
        elements=elements,
        changed=changed,
        flags=encoded.flags if flags < 0 else flags,
        word=np.dtype(word),
        where="here",
    )


def made(places: list[int], deltas: list[int], word: Word = np.uint16) -> Changes:
    width = np.dtype(word).itemsize * 8
    found = np.array([d % (1 << width) or 1 for d in deltas], word)
    return Changes(np.array(places, np.uint32), found)


def raw(gaps: bytes, ulps: bytes, escapes: list[int] = [], changed: int = -1) -> Encoded:  # noqa: B006 - never written
    """A payload put together by hand."""
    count = len(ulps) if changed < 0 else changed
    head = struct.pack("<4I", count, len(gaps), len(ulps), len(escapes))
    return Encoded(head + gaps + ulps + np.array(escapes, np.uint16).tobytes(), 0)


@st.composite
def any_changes(draw: st.DrawFn, word: Word) -> tuple[int, Changes]:
    elements = draw(st.integers(1, 262_144))
    places = sorted(draw(st.sets(st.integers(0, elements - 1), max_size=60)))
    most = (1 << np.dtype(word).itemsize * 8) - 1
    one = st.one_of(st.integers(1, most), st.sampled_from(EDGES))
    deltas = draw(st.lists(one, min_size=len(places), max_size=len(places)))
    return elements, made(places, deltas, word)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("compress", [True, False])
@given(data=st.data())
def test_any_changes_survive(word: Word, *, compress: bool, data: st.DataObject) -> None:
    elements, wanted = data.draw(any_changes(word))
    encoded = l1.encode(wanted, compress=compress)
    assert compress or encoded.flags == 0
    found = decoded(encoded, elements=elements, changed=wanted.index.size, word=word)
    assert np.array_equal(found.index, wanted.index)
    assert np.array_equal(found.delta, wanted.delta)
    assert found.delta.dtype == word


@pytest.mark.parametrize("word", WORDS)
def test_a_block_in_which_everything_changed_survives_compressed(word: Word) -> None:
    size = 262_144
    wanted = Changes(np.arange(size, dtype=np.uint32), np.ones(size, word))
    encoded = l1.encode(wanted)
    assert encoded.flags == 3
    assert len(encoded.payload) < 1000
    found = decoded(encoded, elements=size, changed=size, word=word)
    assert np.array_equal(found.index, wanted.index)
    assert np.array_equal(found.delta, wanted.delta)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_applied_backwards_it_restores_every_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, 3000, np.uint16)
    new = np.where(rng.random(3000) < 0.1, rng.integers(0, 1 << 16, 3000, np.uint16), old)
    there = changes.between(old, new, ordered=True)
    found = decoded(l1.encode(there), elements=3000, changed=there.index.size)
    assert np.array_equal(changes.applied(old, found, ordered=True), new)
    back = Changes(found.index, -found.delta)
    assert np.array_equal(changes.applied(new, back, ordered=True), old)


def test_the_payload_is_as_documented() -> None:
    wanted = made([0, 1, 200, 20_000], [1, -1, 127, 300])
    gaps = bytes([0, 0, 0xC6, 0x01, 0xD7, 0x9A, 0x01])
    expected = raw(gaps, bytes([2, 1, 254, 255]), [300])
    assert l1.encode(wanted, compress=False) == expected


@pytest.mark.parametrize(
    ("encoded", "what"),
    [
        (raw(b"\x80\x00", b"\x02"), "shortest"),
        (raw(b"\x80\x80\x80\x00", b"\x02"), "gaps: 4 bytes"),
        (raw(b"\xff\xff\xff\x7f", b"\x02"), "gaps: 4 bytes"),
        (raw(b"\xff\xff\x7f", b"\x02"), "beyond the block"),
        (raw(b"\x64", b"\x02"), "beyond the block"),
        (raw(b"\x01\x01", b"\x02"), "left-over"),
        (raw(b"\x80", b"\x02"), "end before"),
        (raw(b"", b"\x02"), "gaps: 0 bytes"),
        (raw(b"\x01", b"\x00"), "difference of 0"),
        (raw(b"\x01", b"\xff"), "fewer than"),
        (raw(b"\x01", b"\x02", [300]), "more than"),
        (raw(b"\x01", b"\xff", [5]), "fits a byte"),
        (raw(b"\x01", b"\xff", [65535]), "fits a byte"),
        (raw(b"\x01", b"\x02", changed=2), "2 changes"),
    ],
)
def test_other_streams_are_corrupt(encoded: Encoded, what: str) -> None:
    with pytest.raises(CorruptError, match=f"here: .*{what}"):
        decoded(encoded, elements=100, changed=1)


@pytest.mark.parametrize(("elements", "changed"), [(0, 1), (1 << 22, 1), (5, -1), (100, 2)])
def test_counts_that_cannot_be_are_corrupt(elements: int, changed: int) -> None:
    with pytest.raises(CorruptError, match="here"):
        decoded(raw(b"\x00", b"\x02"), elements=elements, changed=changed)


@pytest.mark.parametrize("flags", [1, 2, 3, 4, 128])
def test_wrong_flags_are_corrupt(flags: int) -> None:
    with pytest.raises(CorruptError, match="here"):
        decoded(raw(b"\x00", b"\x02"), elements=9, changed=1, flags=flags)


def test_no_changes_are_an_empty_payload_of_a_header() -> None:
    encoded = l1.encode(made([], []))
    assert encoded == raw(b"", b"")
    assert decoded(encoded, elements=10, changed=0).index.size == 0


@pytest.mark.parametrize(
    ("places", "deltas"), [([3, 3], [1, 1]), ([4, 3], [1, 1]), ([1 << 21], [1])]
)
def test_impossible_changes_are_refused(places: list[int], deltas: list[int]) -> None:
    with pytest.raises(ValueError, match="increasing"):
        l1.encode(made(places, deltas))
    with pytest.raises(ValueError, match="or 0"):
        l1.encode(Changes(np.array([1], np.uint32), np.array([0], np.uint16)))


def some() -> Changes:
    rng = np.random.default_rng(7)
    index = np.flatnonzero(rng.random(40_000) < 0.01).astype(np.uint32)
    delta = rng.choice([1, 2, 3, 65535, 300, 40_000], index.size).astype(np.uint16)
    return Changes(index, delta)


@pytest.mark.parametrize("compress", [True, False])
def test_truncation_at_every_byte_is_corrupt(*, compress: bool) -> None:
    wanted = some()
    whole = l1.encode(wanted, compress=compress)
    for size in range(len(whole.payload)):
        with pytest.raises(CorruptError):
            decoded(
                Encoded(whole.payload[:size], whole.flags),
                elements=40_000,
                changed=wanted.index.size,
            )


@pytest.mark.parametrize("compress", [True, False])
def test_flipped_bits_give_an_error_or_changes_inside_the_block(*, compress: bool) -> None:
    wanted = some()
    whole = l1.encode(wanted, compress=compress)
    rng = random.Random(1)
    for _ in range(2000):
        bad = bytearray(whole.payload)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        try:
            found = decoded(
                Encoded(bytes(bad), whole.flags), elements=40_000, changed=wanted.index.size
            )
        except CorruptError:
            continue
        assert found.index.size == wanted.index.size
        assert found.index.max() < 40_000
        assert np.all(np.diff(found.index.astype(np.int64)) > 0)
        assert np.all(found.delta != 0)
        if not compress:  # what was believed is canonical: it encodes to the very same bytes
            assert l1.encode(found, compress=False).payload == bytes(bad)
