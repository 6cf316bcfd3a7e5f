"""The embedder interface: vectors of texts in whole numbers, the same on every machine.

Components are int8. Products of two such vectors are sums of whole numbers below 2^24, which
float32 adds without rounding in any order; square roots and divisions are rounded alike by every
IEEE 754 machine. So a cosine has the same bits whatever the CPU, the library or the threads.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from etude.agent.search.tokens import Passage

MAX_COMPONENTS = (1 << 24) // (127 * 127)
"""Longest vectors whose products are exact."""
_BLOCK = 4096

Bytes = NDArray[np.int8]


class Embedder(Protocol):
    """Turns texts into vectors of whole numbers; texts of similar meaning get near ones."""

    @property
    def id(self) -> str:
        """Name of the vectors; a policy that was trained with them gets no others."""
        ...

    @property
    def num_components(self) -> int: ...

    @property
    def floor(self) -> float:
        """Largest cosine of texts that are unrelated to the question."""
        ...

    @property
    def max_texts(self) -> int:
        """Texts of one index that get a vector, which bounds its CPU time."""
        ...

    def embed(self, passages: Sequence[Passage]) -> Bytes:
        """One row per text; zeros if no word of it is known.  [N, C]."""
        ...

    def embed_query(self, question: Passage) -> Bytes:
        """A question, near the texts that answer it.  [C]."""
        row: Bytes = self.embed([question])[0]
        return row


def quantise(sums: NDArray[np.float64]) -> Bytes:
    """The nearest directions with components of int8.  [N, C] -> [N, C]."""
    largest = np.abs(sums).max(axis=1, keepdims=True, initial=0.0)
    rows: Bytes = np.rint(sums * 127 / np.where(largest > 0, largest, 1)).astype(np.int8)
    return rows


def cosines(rows: Bytes, query: Bytes) -> NDArray[np.float64]:
    """Cosine of each row with the query; 0 for zeros.  [N, C], [C] -> [N].

    Raises:
        ValueError: the vectors are too long for exact sums.
    """
    if len(query) > MAX_COMPONENTS:
        raise ValueError(f"{len(query)} components, more than {MAX_COMPONENTS}")
    wanted = query.astype(np.float32)
    found = np.zeros(len(rows))
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK].astype(np.float32)
        squares = np.einsum("nc,nc->n", block, block).astype(np.float64)
        norms = np.sqrt(squares * float(wanted @ wanted))
        products = (block @ wanted).astype(np.float64)
        np.divide(products, norms, out=found[start : start + _BLOCK], where=norms > 0)
    return found
