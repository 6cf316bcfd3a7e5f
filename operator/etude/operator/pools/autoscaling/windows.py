"""Samples within a sliding time window."""

from typing import NamedTuple


class Sample(NamedTuple):
    """A value at a moment."""

    at_s: float
    value: float


Samples = tuple[Sample, ...]
"""Oldest first."""


def add_sample(samples: Samples, sample: Sample, *, keep_s: float) -> Samples:
    """The samples and a new one, without those that are older than all windows."""
    return (*in_window(samples, keep_s, now_s=sample.at_s), sample)


def in_window(samples: Samples, window_s: float, *, now_s: float) -> Samples:
    """The samples of the newest window; one that is exactly as old as the window is out."""
    since_s = now_s - window_s
    first = 0
    while first < len(samples) and samples[first].at_s <= since_s:
        first += 1
    return samples[first:]


def average(samples: Samples, window_s: float, *, now_s: float) -> float | None:
    """Mean of the samples in a window; None if it is empty."""
    inside = in_window(samples, window_s, now_s=now_s)
    return sum(sample.value for sample in inside) / len(inside) if inside else None


def add_peak(peaks: Samples, sample: Sample, *, keep_s: float) -> Samples:
    """Samples that may still be the highest of a window, in descending order of value."""
    staying = in_window(peaks, keep_s, now_s=sample.at_s)
    last = len(staying)
    while last and staying[last - 1].value <= sample.value:
        last -= 1
    return (*staying[:last], sample)


def highest(peaks: Samples, window_s: float, *, now_s: float) -> float:
    """The highest value within a window of samples that raised() kept, at least the newest."""
    return (in_window(peaks, window_s, now_s=now_s) or peaks[-1:])[0].value
