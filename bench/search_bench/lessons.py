"""Lessons of code search: questions, the chunks that answer them, chunks that only look so.

A lesson is made as a search is: packages lose their docstrings, their files are cut into chunks,
and a docstring is asked for the chunk in which its function begins. Wrong chunks are those of the
same package that BM25 ranks first.

Source: hard negatives by BM25, Karpukhin et al., https://arxiv.org/abs/2004.04906.
"""

import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.agent.search import ranking
from etude.agent.search.chunks import Chunk, chunk_files
from etude.agent.search.tokens import count_words
from search_bench import questions
from search_bench.corpus import File
from search_bench.questions import Answer

NUM_WRONG = 4
"""Wrong chunks of each lesson."""


class Lesson(NamedTuple):
    """Numbers of texts."""

    package: str
    question: int
    answer: int
    wrong: Sequence[int]
    """Most alike first."""


@dataclass(slots=True)
class Texts:
    """Distinct words of many texts with their counts, in the order of first occurrence."""

    words: dict[str, int] = field(default_factory=dict)
    numbers: "array[int]" = field(default_factory=lambda: array("i"))
    counts: "array[int]" = field(default_factory=lambda: array("i"))
    ends: "array[int]" = field(default_factory=lambda: array("q", [0]))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def append(self, text: Mapping[str, int]) -> int:
        """Add a text; its number."""
        self.numbers.extend(self.words.setdefault(word, len(self.words)) for word in text)
        self.counts.extend(text.values())
        self.ends.append(len(self.numbers))
        return len(self) - 1

    def frequencies(self) -> list[tuple[str, int]]:
        """Words with the number of texts that hold them, most frequent first."""
        found: NDArray[np.int64] = np.bincount(
            np.array(self.numbers, np.int64), minlength=len(self.words)
        )
        texts = zip(self.words, map(int, found), strict=True)
        return sorted(texts, key=lambda item: (-item[1], item[0]))

    def text(self, number: int) -> Iterator[tuple[int, int]]:
        """Numbers of a text's words, with their counts."""
        some = slice(self.ends[number], self.ends[number + 1])
        return zip(self.numbers[some], self.counts[some], strict=True)


class _Searched(NamedTuple):
    """Chunks of a package with their words."""

    chunks: Sequence[Chunk]
    counts: Sequence[Counter[str]]


def choose(found: Iterable[Answer], refused: set[str], most: int, seed: int) -> list[Answer]:
    """Choose questions that are asked once and not refused, up to so many of a package."""
    answers = list(found)
    random.Random(seed).shuffle(answers)  # noqa: S311 - a sample, no secret
    known = set(refused)
    chosen: list[Answer] = []
    for answer in answers:
        if len(chosen) < most and answer.question not in known:
            known.add(answer.question)
            chosen.append(answer)
    return chosen


def add_lessons(files: Sequence[File], chosen: Sequence[Answer], texts: Texts) -> list[Lesson]:
    """Lessons of one package; their texts are added to the others.

    Args:
        files: of the package.
        chosen: questions about it.
        texts: of all lessons.
    """
    wanted = {answer.path for answer in chosen}
    searched = _chunks([file for file in files if file.path in wanted])
    at = {
        (chunk.path, line): n for n, chunk in enumerate(searched.chunks) for line in _lines(chunk)
    }
    postings = ranking.build_postings(searched.counts)
    places = np.arange(len(searched.chunks))
    numbers: dict[int, int] = {}

    def number(chunk: int) -> int:
        if chunk not in numbers:
            numbers[chunk] = texts.append(searched.counts[chunk])
        return numbers[chunk]

    lessons = []
    for answer in chosen:
        right = at.get((answer.path, answer.line))
        if right is None:
            continue
        asked = count_words(answer.question).counts
        scores = ranking.bm25_scores(postings, asked, postings)
        best = ranking.rank_documents(scores, places)[: NUM_WRONG + 1]
        wrong = [number(int(n)) for n in best if n != right][:NUM_WRONG]
        lessons.append(Lesson(answer.package, texts.append(asked), number(right), wrong))
    return lessons


def _chunks(files: Sequence[File]) -> _Searched:
    bare = {file.path: questions.without_docstrings(file.text).encode() for file in files}
    chunks, counts = [], []
    for piece in chunk_files(bare):
        text = f"{piece.chunk.path}\n{piece.text.decode('utf-8', 'replace')}"
        chunks.append(piece.chunk)
        counts.append(count_words(text).counts)
    return _Searched(chunks, counts)


def _lines(chunk: Chunk) -> range:
    return range(chunk.start, chunk.end + 1)
