"""Dense blocks: raw words or byte planes, and nothing else is believed."""

import random

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs import dense, zstd
from etude.common.weights.coding.codecs.ids import DENSE_PLANES, Encoded
from etude.common.weights.tensors.words import Words

Word = type[np.unsignedinteger]
WORDS: list[Word] = [np.uint8, np.uint16, np.uint32, np.uint64]


def decoded(encoded: Encoded, elements: int, word: Word = np.uint16) -> Words:
    return dense.decode(
        encoded.payload, elements=elements, flags=encoded.flags, word=np.dtype(word), where="here"
    )


@pytest.mark.parametrize("word", WORDS)
@given(data=st.data())
def test_any_words_survive(word: Word, data: st.DataObject) -> None:
    most = (1 << np.dtype(word).itemsize * 8) - 1
    few = data.draw(st.lists(st.integers(0, most), max_size=30))
    words = np.array(few * data.draw(st.integers(1, 40)), word)
    for compress in (True, False):
        encoded = dense.encode(words, compress=compress)
        assert len(encoded.payload) <= words.nbytes
        found = decoded(encoded, words.size, word)
        assert found.dtype == word
        assert np.array_equal(found, words)


def weights(size: int) -> Words:
    values = np.random.default_rng(3).normal(0, 0.02, size).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def test_the_exponents_of_weights_compress_and_their_mantissas_stay_raw() -> None:
    words = weights(20_000)
    encoded = dense.encode(words)
    assert encoded.flags == DENSE_PLANES
    assert len(encoded.payload) < 0.8 * words.nbytes
    assert encoded.payload[:4] == (20_000).to_bytes(4, "little")


def test_raw_words_at_an_odd_address_are_read_aligned() -> None:
    words = weights(50)
    payload = memoryview(b"x" + words.tobytes())[1:]
    found = dense.decode(payload, elements=50, flags=0, word=words.dtype, where="here")
    assert found.flags.aligned
    assert np.array_equal(found, words)


def test_truncation_at_every_byte_and_flags_are_corrupt() -> None:
    words = weights(600)
    for compress in (True, False):
        whole = dense.encode(words, compress=compress)
        for size in range(len(whole.payload)):
            with pytest.raises(CorruptError, match="here"):
                decoded(Encoded(whole.payload[:size], whole.flags), 600)
        for flags in (whole.flags ^ DENSE_PLANES, 2, 255):
            with pytest.raises(CorruptError, match="here"):
                decoded(Encoded(whole.payload, flags), 600)


def test_flipped_bits_give_an_error_or_as_many_words() -> None:
    whole = dense.encode(weights(2000))
    rng = random.Random(1)
    for _ in range(2000):
        bad = bytearray(whole.payload)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        try:
            assert decoded(Encoded(bytes(bad), whole.flags), 2000).size == 2000
        except CorruptError:
            continue


def test_a_frame_that_declares_more_than_it_may_hold_is_refused_before_it_is_unpacked() -> None:
    bomb = zstd.compress(bytes(1 << 26))
    with pytest.raises(CorruptError, match="not 1 to 100"):
        zstd.decompress(bomb, least=1, most=100, where="here")


def test_a_frame_of_undeclared_size_or_with_a_tail_is_refused() -> None:

    writer = zstandard.ZstdCompressor(write_content_size=False)
    with pytest.raises(CorruptError):
        zstd.decompress(writer.compress(b"1234"), least=0, most=100, where="here")
    with pytest.raises(CorruptError):
        zstd.decompress(zstd.compress(b"1234") + b"!", least=0, most=100, where="here")
