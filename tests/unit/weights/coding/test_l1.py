"""L1: what goes in comes out, one encoding per change, and nothing else is believed."""

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs import l1
from etude.common.weights.coding.codecs.ids import Encoded
from etude.common.weights.tensors import changes
from etude.common.weights.tensors.changes import BlockChanges

Word = type[np.unsignedinteger]
WORDS: list[Word] = [np.uint8, np.uint16, np.uint32, np.uint64]
EDGES = [1, -1, 127, -127, 128, -128, 255, 32767, -32768, 65535, -65535]


def decoded(
    encoded: Encoded, *, elements: int, changed: int, word: Word = np.uint16, flags: int = -1
) -> BlockChanges:
    return l1.decode(
        encoded.payload,
        elements=elements,
        changed=changed,
        flags=encoded.flags if flags < 0 else flags,
        word=np.dtype(word),
        where="here",
    )


def made(places: list[int], deltas: list[int], word: Word = np.uint16) -> BlockChanges:
    width = np.dtype(word).itemsize * 8
    found = np.array([d % (1 << width) or 1 for d in deltas], word)
    return BlockChanges(np.array(places, np.uint32), found)


def bits(*codes: tuple[int, int]) -> bytes:
    """Numbers in so many bits each, from the lowest bit of each byte; zeros to the end."""
    text = "".join(format(number, f"0{width}b")[::-1] for number, width in codes if width)
    text += "0" * (-len(text) % 8)
    return bytes(int(text[at : at + 8][::-1], 2) for at in range(0, len(text), 8))


def raw(
    gaps: Sequence[int],
    steps: Sequence[int],
    widths: tuple[int, int] = (0, 0),
    word: Word = np.uint16,
) -> Encoded:
    """What encode() documents, put together by hand."""
    head, lows, highs = bytes(widths), b"", b""
    escapes = b""
    for numbers, width, size in ((gaps, widths[0], 4), (steps, widths[1], np.dtype(word).itemsize)):
        far = [number >> width for number in numbers if number >> width >= 32]
        assert len(far) < 128
        head += bytes([len(far)])
        escapes += b"".join(number.to_bytes(size, "little") for number in far)
        lows += bits(*((number % (1 << width), width) for number in numbers))
        quotients = [min(32, number >> width) for number in numbers]
        highs += bits(*((1 << quotient, quotient + 1) for quotient in quotients))
    return Encoded(head + escapes + lows + highs, 0)


@st.composite
def any_changes(draw: st.DrawFn, word: Word) -> tuple[int, BlockChanges]:
    elements = draw(st.integers(1, 262_144))
    places = sorted(draw(st.sets(st.integers(0, elements - 1), max_size=60)))
    most = (1 << np.dtype(word).itemsize * 8) - 1
    one = st.one_of(st.integers(1, most), st.sampled_from(EDGES))
    deltas = draw(st.lists(one, min_size=len(places), max_size=len(places)))
    return elements, made(places, deltas, word)


@pytest.mark.parametrize("word", WORDS)
@given(data=st.data())
def test_any_changes_survive(word: Word, data: st.DataObject) -> None:
    elements, wanted = data.draw(any_changes(word))
    encoded = l1.encode(wanted)
    assert encoded.flags == 0
    found = decoded(encoded, elements=elements, changed=wanted.index.size, word=word)
    assert np.array_equal(found.index, wanted.index)
    assert np.array_equal(found.delta, wanted.delta)
    assert found.delta.dtype == word


@pytest.mark.parametrize("word", WORDS)
def test_a_block_in_which_everything_changed_takes_three_bits_each(word: Word) -> None:
    size = 262_144
    wanted = BlockChanges(np.arange(size, dtype=np.uint32), np.ones(size, word))
    encoded = l1.encode(wanted)
    assert len(encoded.payload) == 4 + size * 3 // 8
    found = decoded(encoded, elements=size, changed=size, word=word)
    assert np.array_equal(found.index, wanted.index)
    assert np.array_equal(found.delta, wanted.delta)


def numbers_of(wanted: BlockChanges) -> tuple[list[int], list[int]]:
    """Gaps and steps, by Python's own integers."""
    width = wanted.delta.dtype.itemsize * 8
    places = [-1, *wanted.index.tolist()]
    gaps = [after - before - 1 for before, after in pairwise(places)]
    signed = [by - (1 << width) if by >> (width - 1) else by for by in wanted.delta.tolist()]
    return gaps, [2 * by - 1 if by > 0 else -2 * by - 2 for by in signed]


@pytest.mark.parametrize("word", WORDS)
@given(data=st.data())
def test_the_payload_is_the_shortest_of_those_documented(word: Word, data: st.DataObject) -> None:
    _, wanted = data.draw(any_changes(word))
    gaps, steps = numbers_of(wanted)
    found = l1.encode(wanted).payload
    assert found == raw(gaps, steps, (found[0], found[1]), word).payload
    for width in (found[0] - 1, found[0] + 1):
        if 0 <= width <= 20 and wanted.index.size:
            other = raw(gaps, steps, (width, found[1]), word).payload
            assert len(found) <= len(other) + 1


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_applied_backwards_it_restores_every_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, 3000, np.uint16)
    new = np.where(rng.random(3000) < 0.1, rng.integers(0, 1 << 16, 3000, np.uint16), old)
    there = changes.diff_words(old, new, ordered=True)
    found = decoded(l1.encode(there), elements=3000, changed=there.index.size)
    assert np.array_equal(changes.apply_changes(old, found, ordered=True), new)
    back = BlockChanges(found.index, -found.delta)
    assert np.array_equal(changes.apply_changes(new, back, ordered=True), old)


def test_the_payload_is_as_documented() -> None:
    wanted = made([0, 1, 200, 20_000], [1, -1, 127, 300])
    gaps, steps = [0, 0, 198, 19_799], [1, 0, 253, 599]
    found = l1.encode(wanted)
    assert found == raw(gaps, steps, (found.payload[0], found.payload[1]))
    # Gaps 3 and 0, steps 0 and 33, in widths of 1 and 0 bits.
    assert raw([3, 0], [0, 33], (1, 0)).payload == bytes(
        [1, 0, 0, 1, 33, 0, 0b01, 0b110, 0b00000001, 0, 0, 0, 0b10]
    )


GOOD = raw([3, 0], [0, 33], (1, 0)).payload


def altered(place: int, value: int) -> Encoded:
    return Encoded(GOOD[:place] + bytes([value]) + GOOD[place + 1 :], 0)


def test_the_payload_that_is_altered_below_is_good() -> None:
    found = decoded(Encoded(GOOD, 0), elements=100, changed=2)
    assert found.index.tolist() == [3, 4]
    assert found.delta.tolist() == [0xFFFF, 17]


@pytest.mark.parametrize(
    ("encoded", "what"),
    [
        (altered(0, 21), "widths"),
        (altered(1, 16), "widths"),
        (altered(2, 3), "escapes"),
        (altered(2, 0x80), "escapes"),
        (altered(2, 1), "gaps|too few|escapes"),
        (altered(3, 0), "steps"),
        (altered(4, 31), "needs none"),
        (altered(6, 0b101), "gaps: left-over bits"),
        (altered(7, 0b1110), "gaps: left-over bits"),
        (altered(12, 0b110), "steps: left-over bits"),
        (altered(12, 0b100), "steps: a quotient that"),
        (altered(12, 0), "steps: end before"),
        (Encoded(GOOD + b"\0", 0), "left-over bytes"),
        (raw([3, 96], [0, 0]), "beyond the block"),
        (raw([3, 1 << 31], [0, 0]), "out of range"),
        (raw([3, 0], [0, 0xFFFF]), "out of range"),
        (raw([3, 0], [0, 0xFFFF], (0, 15)), "out of range"),
        (raw([3, 0], [0, 0x1FFFE], (0, 15)), "out of range"),
        (raw([3], [0]), "too few|end before"),
        (raw([3, 0, 0], [0, 0, 0]), "left-over"),
        (Encoded(b"", 0), "no L1 block"),
        (Encoded(b"\0\0", 0), "inside a number"),
    ],
)
def test_other_streams_are_corrupt(encoded: Encoded, what: str) -> None:
    with pytest.raises(CorruptError, match=f"here: .*({what})"):
        decoded(encoded, elements=100, changed=2)


def test_more_changes_than_the_payload_has_bits_for_take_no_memory() -> None:
    with pytest.raises(CorruptError, match="too few"):
        decoded(Encoded(GOOD, 0), elements=1 << 21, changed=1 << 21)


@pytest.mark.parametrize(("elements", "changed"), [(0, 1), (1 << 22, 1), (5, -1), (100, 2)])
def test_counts_that_cannot_be_are_corrupt(elements: int, changed: int) -> None:
    with pytest.raises(CorruptError, match="here"):
        decoded(raw([0], [1]), elements=elements, changed=changed)


@pytest.mark.parametrize("flags", [1, 2, 3, 4, 128])
def test_wrong_flags_are_corrupt(flags: int) -> None:
    with pytest.raises(CorruptError, match="here"):
        decoded(raw([0], [1]), elements=9, changed=1, flags=flags)


def test_no_changes_are_an_empty_payload_of_a_header() -> None:
    encoded = l1.encode(made([], []))
    assert encoded == raw([], [])
    assert decoded(encoded, elements=10, changed=0).index.size == 0


@pytest.mark.parametrize(
    ("places", "deltas"), [([3, 3], [1, 1]), ([4, 3], [1, 1]), ([1 << 21], [1])]
)
def test_impossible_changes_are_refused(places: list[int], deltas: list[int]) -> None:
    with pytest.raises(ValueError, match="increasing"):
        l1.encode(made(places, deltas))
    with pytest.raises(ValueError, match="or 0"):
        l1.encode(BlockChanges(np.array([1], np.uint32), np.array([0], np.uint16)))


def some() -> BlockChanges:
    rng = np.random.default_rng(7)
    index = np.flatnonzero(rng.random(40_000) < 0.004).astype(np.uint32)
    delta = rng.choice([1, 2, 3, 65535, 300, 40_000], index.size).astype(np.uint16)
    return BlockChanges(index, delta)


def test_truncation_at_every_byte_is_corrupt() -> None:
    wanted = some()
    whole = l1.encode(wanted)
    for size in range(len(whole.payload)):
        cut = Encoded(whole.payload[:size], 0)
        with pytest.raises(CorruptError):
            decoded(cut, elements=40_000, changed=wanted.index.size)


def test_flipped_bits_give_an_error_or_changes_inside_the_block() -> None:
    wanted = some()
    whole = l1.encode(wanted)
    rng = random.Random(1)
    for _ in range(2000):
        bad = bytearray(whole.payload)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        try:
            found = decoded(Encoded(bytes(bad), 0), elements=40_000, changed=wanted.index.size)
        except CorruptError:
            continue
        assert found.index.size == wanted.index.size
        assert found.index.max() < 40_000
        assert np.all(np.diff(found.index.astype(np.int64)) > 0)
        assert np.all(found.delta != 0)
        # What was believed is canonical but for its widths: the same bits put together by hand.
        assert raw(*numbers_of(found), (bad[0], bad[1])).payload == bytes(bad)
