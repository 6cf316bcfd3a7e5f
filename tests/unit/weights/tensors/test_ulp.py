"""The ulp axis: a bijection on all words, monotone in the value, exact both ways."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.weights.tensors import changes, ulp
from etude.common.weights.tensors.words import Words

WORDS = [np.uint8, np.uint16, np.uint32, np.uint64]
EDGES = [0, 1, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFC1, 0xFFFF]


def key(word: int, width: int) -> int:
    """The axis in plain integers."""
    top = 1 << (width - 1)
    return word ^ top if word < top else (1 << width) - 1 - word


def test_the_axis_of_bf16_is_monotone_in_the_value_and_hits_every_place_once() -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    places = ulp.delta(np.full_like(words, 0xFFFF), words, ordered=True)
    assert np.array_equal(np.sort(places), words)
    values = (words.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(values)
    along = values[finite][np.argsort(places[finite])]
    assert np.all(np.diff(along) >= 0)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("ordered", [True, False])
@given(data=st.data())
def test_a_difference_is_that_of_plain_integers_and_leads_back(
    word: type[np.unsignedinteger], *, ordered: bool, data: st.DataObject
) -> None:
    width = np.dtype(word).itemsize * 8
    one = st.one_of(
        st.integers(0, (1 << width) - 1), st.sampled_from([e % (1 << width) for e in EDGES])
    )
    pairs = data.draw(st.lists(st.tuples(one, one), max_size=20))
    old = np.array([pair[0] for pair in pairs], word)
    new = np.array([pair[1] for pair in pairs], word)
    expected = [
        ((key(n, width) - key(o, width)) if ordered else n - o) % (1 << width) for o, n in pairs
    ]
    found = ulp.delta(old, new, ordered=ordered)
    assert found.dtype == word
    assert found.tolist() == expected
    assert np.array_equal(ulp.add_ulps(old, found, ordered=ordered), new)


def test_neighbouring_values_are_one_apart_across_zero() -> None:
    negative_zero, zero, smallest = np.array([[0x8000], [0x0000], [0x0001]], np.uint16)
    assert ulp.delta(negative_zero, zero, ordered=True).tolist() == [1]
    assert ulp.delta(zero, smallest, ordered=True).tolist() == [1]


@pytest.mark.parametrize("word", WORDS)
@given(data=st.data())
def test_changes_name_exactly_the_elements_that_differ(
    word: type[np.unsignedinteger], data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, 200))
    most = (1 << np.dtype(word).itemsize * 8) - 1
    old: Words = np.random.default_rng(size).integers(0, most, size, dtype=word, endpoint=True)
    new = old.copy()
    if size:
        for place in data.draw(st.sets(st.integers(0, size - 1))):
            new[place] = data.draw(st.integers(0, most))
    assert np.array_equal(changes.changed_places(old, new), np.flatnonzero(old != new))
    found = changes.diff_words(old, new, ordered=True)
    assert np.all(found.delta != 0)
    assert np.array_equal(changes.apply_changes(old, found, ordered=True), new)


def test_states_of_different_types_are_not_compared() -> None:
    with pytest.raises(ValueError, match="uint16"):
        changes.changed_places(np.zeros(3, np.uint16), np.zeros(3, np.uint8))
