"""Embedder with an encoder that was trained on questions about code."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from typing_extensions import override

from etude.agent.search.embedders.interface import Bytes, Embedder
from etude.agent.search.embedders.transformer import CODE, QUESTION, Transformer
from etude.agent.search.embedders.weights import EncoderWeights, load_weights
from etude.agent.search.embedders.word_rows import WordRows
from etude.agent.search.tokens import Passage

_BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedEmbedder(Embedder):
    """An encoder; build it with `of` or `load`."""

    id: str
    words: WordRows = field(repr=False)
    transformer: Transformer = field(repr=False)
    max_texts: int = 20_000
    """A minute or two of CPU time."""

    @property
    @override
    def num_components(self) -> int:
        return self.transformer.weights.num_components

    @property
    @override
    def floor(self) -> float:
        return 0.2

    @override
    def embed(self, passages: Sequence[Passage]) -> Bytes:
        texts = [self.words.read(passage.counts) for passage in passages]
        rows = np.zeros((len(texts), self.num_components), np.int8)
        # Texts of a length are computed together, so that little of the work is for padding.
        order = sorted(range(len(texts)), key=lambda index: (len(texts[index]), index))
        for start in range(0, len(order), _BATCH):
            some = order[start : start + _BATCH]
            rows[some] = self.transformer.encode([texts[index] for index in some], CODE)
        return rows

    @override
    def embed_query(self, question: Passage) -> Bytes:
        words = self.words.read(question.counts)
        row: Bytes = self.transformer.encode([words], QUESTION)[0]
        return row

    @classmethod
    def of(cls, weights: EncoderWeights) -> Self:
        """Build the embedder of some weights."""
        return cls(
            id=f"trained-{weights.digest[:16]}",
            words=WordRows(rows={word: row for row, word in enumerate(weights.words)}),
            transformer=Transformer.of(weights),
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the encoder from a file.

        Raises:
            CorruptError: the file is not one.
        """
        return cls.of(load_weights(path))

    def save(self, path: Path) -> None:
        """Write the encoder to a file, the same bytes for the same encoder."""
        self.transformer.weights.save(path)
