"""Dense deltas: how far every word moved, read back exactly or refused."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs import dense_delta
from etude.common.weights.coding.codecs.ids import Encoded
from etude.common.weights.tensors.changes import BlockChanges
from etude.common.weights.tensors.words import Words

Word = type[np.unsignedinteger]
WORDS: list[Word] = [np.uint8, np.uint16, np.uint32, np.uint64]


def decoded(
    encoded: Encoded, *, elements: int, changed: int, word: Word = np.uint16, flags: int = 0
) -> BlockChanges:
    return dense_delta.decode(
        encoded.payload,
        elements=elements,
        changed=changed,
        flags=flags,
        word=np.dtype(word),
        where="here",
    )


def changes_of(delta: Words) -> BlockChanges:
    index = np.flatnonzero(delta)
    return BlockChanges(index.astype(np.uint32), delta[index])


def words_of(changes: BlockChanges, size: int) -> Words:
    delta = np.zeros(size, changes.delta.dtype)
    delta[changes.index] = changes.delta
    return delta


@pytest.mark.parametrize("word", WORDS)
@given(data=st.data())
def test_any_changes_survive(word: Word, data: st.DataObject) -> None:
    bits = np.dtype(word).itemsize * 8
    edges = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    one = st.one_of(st.sampled_from(edges), st.integers(0, (1 << bits) - 1))
    delta = np.array(data.draw(st.lists(one, min_size=1, max_size=80)), word)
    encoded = dense_delta.encode(changes_of(delta), elements=delta.size)
    assert encoded.flags == 0
    changed = int(np.count_nonzero(delta))
    found = decoded(encoded, elements=delta.size, changed=changed, word=word)
    assert found.delta.dtype == word
    assert np.array_equal(words_of(found, delta.size), delta)


def test_the_payload_is_as_documented() -> None:
    # Steps of 0, +1, -1, +200 and -32768 are the zigzags 0, 2, 1, 400 and 65535.
    delta = np.array([0, 1, 0xFFFF, 200, 0x8000], np.uint16)
    expected = bytes([5, 0, 0, 0, 5, 0, 0, 0, 0, 2, 1, 144, 255, 0, 0, 0, 1, 255])
    assert dense_delta.encode(changes_of(delta), elements=5) == Encoded(expected, 0)


def some(size: int) -> Words:
    rng = np.random.default_rng(5)
    steps: Words = np.rint(rng.normal(0, 3000, size)).astype(np.int64).astype(np.uint32)
    return steps


def test_empty_planes_take_next_to_nothing() -> None:
    encoded = dense_delta.encode(changes_of(some(50_000)), elements=50_000)
    assert len(encoded.payload) < 0.45 * 4 * 50_000


def test_truncation_at_every_byte_flags_and_counts_are_corrupt() -> None:
    delta = some(700)
    whole = dense_delta.encode(changes_of(delta), elements=700)
    changed = int(np.count_nonzero(delta))
    for size in range(len(whole.payload)):
        cut = Encoded(whole.payload[:size], 0)
        with pytest.raises(CorruptError, match="here"):
            decoded(cut, elements=700, changed=changed, word=np.uint32)
    for wrong in ({"flags": 1}, {"elements": 699}, {"elements": 701}, {"changed": changed - 1}):
        asked = {"elements": 700, "changed": changed, **wrong}
        with pytest.raises(CorruptError, match="here"):
            decoded(whole, **asked, word=np.uint32)


def test_flipped_bits_give_an_error_or_as_many_changes() -> None:
    delta = some(2000)
    whole = dense_delta.encode(changes_of(delta), elements=2000)
    changed = int(np.count_nonzero(delta))
    rng = random.Random(1)
    for _ in range(2000):
        bad = bytearray(whole.payload)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        try:
            found = decoded(Encoded(bytes(bad), 0), elements=2000, changed=changed, word=np.uint32)
        except CorruptError:
            continue
        assert found.index.size == changed
        assert np.all(np.diff(found.index.astype(np.int64)) > 0)
        assert found.index[-1] < 2000
        assert np.all(found.delta != 0)
