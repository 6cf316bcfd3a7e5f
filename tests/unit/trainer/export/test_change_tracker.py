"""Changes since a version, gathered over many steps."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.trainer.export import change_tracker
from etude.trainer.export.change_tracker import ChangeTracker, OldShard
from etude.trainer.export.touched import MOST_TOUCHED, TouchedElements

SIZE = 300


def bits(values: npt.NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(values.view(np.int16))


steps = st.lists(st.dictionaries(st.integers(0, SIZE - 1), st.integers(0, 2**16 - 1), max_size=80))


@given(drawn=steps, cut=st.integers(0, 10))
def test_the_first_old_bits_of_every_touched_place_are_kept(
    drawn: list[dict[int, int]], cut: int
) -> None:
    words = np.arange(SIZE, dtype=np.uint16)
    base = words.copy()
    watch = ChangeTracker()
    watch.take_changes()
    touched: set[int] = set()
    taken: change_tracker.Changes = {}
    for number, step in enumerate(drawn):
        if number == cut:
            taken = watch.take_changes()
        before = words.copy()
        for place, value in step.items():
            words[place] = value
        touched |= set(np.flatnonzero(words != before).tolist())
        watch.record("w", bits(before), bits(words))
    found = change_tracker.merge_changes(taken, watch.take_changes(), elements={"w": SIZE}).get(
        "w", ()
    )
    if found is None:
        # Two lists that are too long together: the bits between them are known no more.
        assert len(touched) > SIZE * MOST_TOUCHED
    elif isinstance(found, OldShard):
        assert len(touched) > SIZE * MOST_TOUCHED
        assert np.array_equal(found.old, base)
    elif not touched:
        assert found == ()
    else:
        assert isinstance(found, TouchedElements)
        assert found.flat.tolist() == sorted(touched)
        assert np.array_equal(found.old, base[found.flat])


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_differences_are_found_in_every_width_and_at_both_ends(
    dtype: type[np.signedinteger],
) -> None:
    old = np.arange(200).astype(dtype)
    new = old.copy()
    places = [0, 63, 64, 127, 199]
    new[places] = -1
    found = change_tracker.find_differences(torch.from_numpy(old), torch.from_numpy(new))
    assert found is not None
    assert found.flat.tolist() == places
    assert found.old.tolist() == [0, 63, 64, 127, int(np.uint64(199) if dtype != np.int8 else 199)]


def test_a_shard_without_elements_never_changes() -> None:
    nothing = torch.empty(0, dtype=torch.int16)
    found = change_tracker.find_differences(nothing, nothing)
    assert found is not None
    assert found.flat.size == 0


def test_of_a_parameter_that_changed_too_much_all_old_bits_are_kept_until_the_next_version() -> (
    None
):
    watch = ChangeTracker()
    assert not watch.wants("w")
    watch.take_changes()
    old = np.arange(100, dtype=np.uint16)
    few = old.copy()
    few[[3, 50]] = 1000
    watch.record("w", bits(old), bits(few))
    assert watch.wants("w")
    watch.record("w", bits(few), bits(few + np.uint16(1)))
    assert not watch.wants("w")
    assert watch.wants("v")
    found = watch.take_changes()["w"]
    assert isinstance(found, OldShard)
    assert np.array_equal(found.old, old)
    assert watch.wants("w")
    watch.disarm()
    assert not watch.wants("w")


def test_beyond_a_limit_parameters_that_changed_too_much_are_forgotten() -> None:
    watch = ChangeTracker(most_kept_bytes=300)
    watch.take_changes()
    old = np.zeros(100, np.uint16)
    for name in ("u", "v"):
        watch.record(name, bits(old), bits(old + np.uint16(1)))
        assert not watch.wants(name)
    found = watch.take_changes()
    assert isinstance(found["u"], OldShard)
    assert found["v"] is None
    # The bits of the next version are another matter.
    watch.record("v", bits(old), bits(old + np.uint16(1)))
    assert isinstance(watch.take_changes()["v"], OldShard)


def test_old_bits_of_the_first_period_win_over_those_of_the_next() -> None:
    base = np.arange(8, dtype=np.uint16)
    first = TouchedElements(np.array([1, 5]), base[[1, 5]])
    then = OldShard(np.where(np.isin(base, [1, 5]), 77, base).astype(np.uint16))
    found = change_tracker.merge_touched(first, then, elements=8)
    assert isinstance(found, OldShard)
    assert np.array_equal(found.old, base)
    assert change_tracker.merge_touched(found, first, elements=8) is found
    assert change_tracker.merge_touched(found, None, elements=8) is found
    assert change_tracker.merge_touched(first, None, elements=8) is None
    assert change_tracker.merge_touched(None, then, elements=8) is None
