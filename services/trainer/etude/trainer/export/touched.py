"""Touched elements of a tensor or shard, with their old values."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors.words import Words

Flat = npt.NDArray[np.int64]

MOST_TOUCHED = 0.25
"""Largest share of touched elements: above it a list takes more memory than all old bits, and a
complete copy fewer bytes than a delta."""


class TouchedElements(NamedTuple):
    """Elements that may have changed since a version."""

    flat: Flat
    """Row-major, increasing. [k]"""
    old: Words
    """Values in the version. [k]"""
