"""Embedder with a table that was trained on questions about code: one row per word, summed.

    v(text) = Σ_w f(tf(w)) · scale(w) · row(w),   f(n) = round(16 · (1 + ln n))

Rows, scales and f are whole numbers, so the sum is exact. A word without a row adds nothing.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from zipfile import BadZipFile

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from typing_extensions import override

from etude.agent.search.embedders.interface import MAX_COMPONENTS, Bytes, Embedder, quantise
from etude.agent.search.tokens import COUNT_WEIGHTS, MAX_COUNT, Passage
from etude.common.errors import CorruptError

MAX_FILE_BYTES = 64 << 20
_MAX_SCALE = 4095
_COUNT_WEIGHTS = np.array(COUNT_WEIGHTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedEmbedder(Embedder):
    """A table of words; build it with `of` or `load`."""

    digest: str
    """BLAKE3 of words, rows and scales."""
    ids: Mapping[str, int]
    rows: Bytes
    """[V, C]."""
    scales: NDArray[np.uint16]
    """Length of each row, in steps.  [V]."""

    @property
    @override
    def id(self) -> str:
        return f"trained-{self.digest[:16]}"

    @property
    @override
    def num_components(self) -> int:
        return int(self.rows.shape[1])

    @property
    @override
    def floor(self) -> float:
        return 0.2

    @override
    def embed(self, passages: Sequence[Passage]) -> Bytes:
        sums = np.zeros((len(passages), self.num_components))
        for index, passage in enumerate(passages):
            held = [(self.ids[w], n) for w, n in passage.counts.items() if w in self.ids]
            if held:
                ids, counts = np.array(held).T
                weights = _COUNT_WEIGHTS[np.minimum(counts, MAX_COUNT)] * self.scales[ids]
                sums[index] = weights.astype(np.float64) @ self.rows[ids].astype(np.float64)
        return quantise(sums)

    @classmethod
    def quantise_rows(cls, words: Sequence[str], rows: NDArray[np.float32]) -> Self:
        """The nearest table of whole numbers."""
        largest = np.abs(rows).max(axis=1)
        scales = np.rint(largest * _MAX_SCALE / largest.max()).astype(np.uint16)
        return cls._build("\n".join(words).encode(), quantise(rows.astype(np.float64)), scales)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the table from a file that `save` wrote.

        Raises:
            CorruptError: the file is not a table.
        """
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CorruptError(f"{path} is larger than any table of words")
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as found:
                words, rows, scales = (found[name] for name in ("words", "rows", "scales"))
        except (ValueError, KeyError, OSError, EOFError, BadZipFile) as error:
            raise CorruptError(f"{path} is not a table of words: {error}") from error
        kinds = (words.dtype, rows.dtype, scales.dtype)
        text = words.tobytes()
        num_words = text.count(b"\n") + 1
        if (
            kinds != (np.uint8, np.int8, np.uint16)
            or rows.ndim != 2
            or scales.shape != (num_words,)
            or rows.shape[0] != num_words
            or not 0 < rows.shape[1] <= MAX_COMPONENTS
        ):
            raise CorruptError(f"{path} is not a table of words: its parts do not fit together")
        return cls._build(text, rows, scales)

    def save(self, path: Path) -> None:
        """Write the table to a file, the same bytes for the same table."""
        words = np.frombuffer("\n".join(self.ids).encode(), np.uint8)
        with path.open("wb") as file:
            np.savez(file, words=words, rows=self.rows, scales=self.scales)

    @classmethod
    def _build(cls, text: bytes, rows: Bytes, scales: NDArray[np.uint16]) -> Self:
        digest = blake3(text + b"\0" + rows.tobytes() + scales.astype("<u2").tobytes()).hexdigest()
        words = text.decode("ascii", "replace").split("\n")
        ids = {word: index for index, word in enumerate(words)}
        return cls(digest=digest, ids=ids, rows=rows, scales=scales)
