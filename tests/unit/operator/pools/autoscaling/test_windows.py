"""Sliding windows against the plain definition over all samples."""

from hypothesis import given
from hypothesis import strategies as st

from etude.operator.pools.autoscaling.windows import (
    Sample,
    Samples,
    add_peak,
    add_sample,
    average,
    highest,
)

values = st.lists(st.integers(0, 50), min_size=1, max_size=60)
windows = st.integers(0, 40)


def series(found: list[int]) -> Samples:
    return tuple(Sample(2.0 * n, value) for n, value in enumerate(found))


@given(values, windows)
def test_the_highest_of_a_window_is_that_of_all_its_samples(found: list[int], window: int) -> None:
    peaks: Samples = ()
    for sample in series(found):
        peaks = add_peak(peaks, sample, keep_s=40.0)
        inside = [s.value for s in series(found) if sample.at_s - window < s.at_s <= sample.at_s]

        assert highest(peaks, window, now_s=sample.at_s) == max(inside or [sample.value])


@given(values, st.integers(1, 40))
def test_an_average_is_that_of_the_samples_of_its_window(found: list[int], window: int) -> None:
    kept: Samples = ()
    for sample in series(found):
        kept = add_sample(kept, sample, keep_s=40.0)
        inside = [s.value for s in series(found) if sample.at_s - window < s.at_s <= sample.at_s]

        assert average(kept, window, now_s=sample.at_s) == sum(inside) / len(inside)
    assert len(kept) <= 20, "what is older than all windows is forgotten"
