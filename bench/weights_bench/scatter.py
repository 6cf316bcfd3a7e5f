"""A scatter on one thread, as fast as we know how: the raw codec deserves no worse."""

import numpy.typing as npt
from numpy import int32

from etude.common.weights.tensors.jit import compiled
from etude.common.weights.tensors.words import Words


@compiled
def scatter(live: Words, places: npt.NDArray[int32], values: Words) -> None:
    """live[places] = values.  [n], [k], [k]."""
    for i in range(places.size):
        live[places[i]] = values[i]
