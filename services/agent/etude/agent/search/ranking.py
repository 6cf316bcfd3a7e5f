"""Ranking of chunks: BM25 scores of their words, reciprocal rank fusion of several orders.

    score(q, d) = Σ_w idf(w) · tf(w, d) / (tf(w, d) + k1 · (1 - b + b · |d| / mean |d|))
    idf(w) = ln(1 + (N - n(w) + 1/2) / (n(w) + 1/2))
    fused(d) = Σ_r 1 / (60 + rank_r(d))

Sources: Robertson, Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), with
the idf of Lucene, which is never negative; Cormack, Clarke, Büttcher, "Reciprocal Rank Fusion
outperforms Condorcet and individual Rank Learning Methods" (SIGIR 2009).
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

K1, B = 1.5, 0.75
K = 60
_PER_UNIT = 10_000
"""Scores are compared in steps of 1e-4, below which two CPUs may differ."""

Scores = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Postings:
    """Inverted index: word `i` is in the documents from bounds[i] to bounds[i + 1]."""

    ids: dict[str, int]
    bounds: NDArray[np.int64]
    documents: NDArray[np.int32]
    counts: NDArray[np.int32]
    lengths: NDArray[np.int64]
    """Words of each document."""

    @property
    def mean_length(self) -> float:
        """Mean number of words of a document."""
        return int(self.lengths.sum()) / len(self.lengths) if self.lengths.any() else 1.0

    def idf(self, word: str) -> float:
        """Weight of a word; largest for one that no document holds."""
        at = self.ids.get(word)
        frequency = 0 if at is None else int(self.bounds[at + 1] - self.bounds[at])
        return math.log(1 + (len(self.lengths) - frequency + 0.5) / (frequency + 0.5))


def build_postings(documents: Iterable[Counter[str]]) -> Postings:
    """Build the inverted index of documents, given as counts of words."""
    ids: dict[str, int] = {}
    flat, counts, sizes, lengths = array("i"), array("i"), array("i"), array("q")
    for document in documents:
        flat.extend(ids.setdefault(word, len(ids)) for word in document)
        counts.extend(document.values())
        sizes.append(len(document))
        lengths.append(document.total())
    words = np.array(flat, np.int32)
    order = np.argsort(words, kind="stable")
    places = np.repeat(np.arange(len(sizes), dtype=np.int32), np.array(sizes, np.int32))
    ends = np.cumsum(np.bincount(words, minlength=len(ids)))
    return Postings(
        ids=ids,
        bounds=np.concatenate((np.zeros(1, np.int64), ends)),
        documents=places[order],
        counts=np.array(counts, np.int32)[order],
        lengths=np.array(lengths, np.int64),
    )


def bm25_scores(found: Postings, query: Iterable[str], known: Postings) -> NDArray[np.float64]:
    """Score of every document; each word of the query counts once.

    Args:
        found: the documents.
        query: words.
        known: the documents that give the weights of words and the mean length.
    """
    totals = np.zeros(len(found.lengths))
    norms = K1 * (1 - B + B * found.lengths / known.mean_length)
    # Floating-point sums depend on their order, so it is that of the words, not of the question.
    for word in sorted(set(query)):
        at = found.ids.get(word)
        if at is None:
            continue
        some = slice(found.bounds[at], found.bounds[at + 1])
        documents, counts = found.documents[some], found.counts[some]
        totals[documents] += known.idf(word) * counts / (counts + norms[documents])
    return totals


def rank_documents(scores: Scores, places: Places) -> Places:
    """Documents with a score above 0, best first; equal ones by their place.  [N], [N] -> [M]."""
    steps = np.rint(scores * _PER_UNIT).astype(np.int64)
    ordered = np.lexsort((places, -steps))
    found: Places = ordered[steps[ordered] > 0]
    return found


def fuse_ranks(orders: Sequence[Places], places: Places, limit: int) -> Places:
    """The best documents of all orders, best first; equal ones by their place."""
    totals = np.zeros(len(places))
    for each in orders:
        totals[each] += 1 / (K + np.arange(1, len(each) + 1))
    ordered = np.lexsort((places, -totals))
    found: Places = ordered[totals[ordered] > 0][:limit]
    return found
