"""Hashed embedder without a model: each word has a fixed random direction, a text their mean.

Long words weigh more, as they are rarer in all code. It sees only the words that texts share, and
is the null hypothesis of every model.
"""

import functools
import zlib
from collections.abc import Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from typing_extensions import override

from etude.agent.search.contents import HASHED_ID
from etude.agent.search.embedders.interface import Bytes, Embedder, quantise
from etude.agent.search.tokens import COUNT_WEIGHTS, MAX_COUNT, Passage

COMPONENTS = 256
_ROWS = 1 << 16
_MAX_LETTERS = 8
_DICE = 4
"""Bytes whose sum is one component: bell-shaped, and integer."""


class HashedEmbedder(Embedder):
    """The embedder that needs no model."""

    __slots__ = ()

    @property
    @override
    def id(self) -> str:
        return HASHED_ID

    @property
    @override
    def num_components(self) -> int:
        return COMPONENTS

    @property
    @override
    def floor(self) -> float:
        return 0.4  # lower cosines come from words that all code shares

    @property
    @override
    def max_texts(self) -> int:
        return 200_000  # ten seconds of CPU time

    @override
    def embed(self, passages: Sequence[Passage]) -> Bytes:
        sums = np.zeros((len(passages), COMPONENTS))
        for index, passage in enumerate(passages):
            if passage.counts:
                rows = np.stack(
                    [_row(zlib.crc32(word.encode()) % _ROWS) for word in passage.counts]
                )
                weights = [_weight(word, count) for word, count in passage.counts.items()]
                sums[index] = np.array(weights, np.float64) @ rows
        return quantise(sums)


def _weight(word: str, count: int) -> int:
    return COUNT_WEIGHTS[min(count, MAX_COUNT)] * min(len(word), _MAX_LETTERS)


@functools.lru_cache(maxsize=_ROWS)
def _row(number: int) -> NDArray[np.float64]:
    # A random generator's stream may change with its library; this one cannot.
    drawn = blake3(b"etude hashed-1 %d" % number).digest(COMPONENTS * _DICE)
    dice = np.frombuffer(drawn, np.uint8).reshape(COMPONENTS, _DICE)
    row: NDArray[np.float64] = dice.sum(axis=1, dtype=np.float64) - _DICE * 127.5
    return row
