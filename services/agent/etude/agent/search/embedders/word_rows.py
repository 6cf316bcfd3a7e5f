"""Rows of words in a trained encoder, and pieces of the words that have none."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAX_WORDS = 128
"""Distinct words of a text that an encoder reads; attention costs their square."""
_MIN_PIECE_CHARS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WordRows:
    """Rows of words."""

    rows: Mapping[str, int]

    def read(self, counts: Mapping[str, int]) -> dict[int, int]:
        """Rows of a text's distinct words, in the order of first occurrence, with their counts."""
        found: dict[int, int] = {}
        for word, count in counts.items():
            for row in self._split(word):
                found[row] = found.get(row, 0) + count
            if len(found) >= MAX_WORDS:
                break
        return dict(list(found.items())[:MAX_WORDS])

    def _split(self, word: str) -> Iterator[int]:
        """The row of a word, or those of the longest pieces that have one: host, name."""
        row = self.rows.get(word)
        if row is not None:
            yield row
            return
        start = 0
        while len(word) - start >= _MIN_PIECE_CHARS:
            ends = range(len(word), start + _MIN_PIECE_CHARS - 1, -1)
            end = next((end for end in ends if word[start:end] in self.rows), 0)
            if end:
                yield self.rows[word[start:end]]
            start = end or start + 1
