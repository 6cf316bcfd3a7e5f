"""BM25, cosines and their fusion, against other people's and by hand."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import bm25s  # type: ignore[import-untyped]  # ships no type information
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st
from numpy.typing import NDArray

from etude.agent.search import ranking
from etude.agent.search.embedders.interface import cosines, quantise
from etude.agent.search.tokens import split_words

WORDS = [f"word{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"] + ["the", "of", "self"]


@pytest.fixture(scope="module")
def documents() -> list[list[str]]:
    chance = random.Random(5)
    weights = [1 / (rank + 1) for rank in range(len(WORDS))]
    return [chance.choices(WORDS, weights, k=chance.randint(1, 120)) for _ in range(500)]


def by_the_book(documents: Sequence[Sequence[str]], query: Sequence[str]) -> list[float]:
    """BM25 in twenty lines."""
    counts = [Counter(document) for document in documents]
    mean = sum(map(len, documents)) / len(documents)
    found = []
    for document, count in zip(documents, counts, strict=True):
        score = 0.0
        for word in set(query):
            held = sum(word in other for other in counts)
            idf = math.log(1 + (len(documents) - held + 0.5) / (held + 0.5))
            norm = 1.5 * (1 - 0.75 + 0.75 * len(document) / mean)
            score += idf * count[word] / (count[word] + norm)
        found.append(score)
    return found


QUERIES = [["worda", "wordz"], ["the", "of"], ["self"], ["nothing"], ["wordc", "wordd", "worde"]]


@pytest.mark.parametrize("query", QUERIES)
def test_scores_are_those_of_the_book(documents: list[list[str]], query: list[str]) -> None:
    held = ranking.build_postings(map(Counter, documents))
    assert ranking.bm25_scores(held, query, held) == pytest.approx(by_the_book(documents, query))


@pytest.mark.parametrize("query", QUERIES)
def test_the_order_is_that_of_bm25s(documents: list[list[str]], query: list[str]) -> None:
    other = bm25s.BM25(k1=ranking.K1, b=ranking.B, method="lucene")
    other.index([[*document] for document in documents], show_progress=False)
    held = ranking.build_postings(map(Counter, documents))
    ours = ranking.bm25_scores(held, query, held)
    theirs = other.get_scores(query) if query != ["nothing"] else np.zeros(len(documents))
    places = np.arange(len(documents))
    assert (
        ranking.rank_documents(ours, places).tolist()
        == ranking.rank_documents(theirs, places).tolist()
    )


def test_a_word_that_no_document_holds_weighs_most_and_changes_nothing() -> None:
    held = ranking.build_postings([Counter("ab"), Counter("a")])
    assert held.idf("z") > held.idf("b") > held.idf("a") > 0
    one, other = (ranking.bm25_scores(held, query, held) for query in ("ab", "abz"))
    assert one.tolist() == other.tolist()


def test_no_documents_have_no_scores() -> None:
    held = ranking.build_postings([])
    assert ranking.bm25_scores(held, ["a"], held).shape == (0,)
    assert ranking.build_postings([Counter()]).mean_length == 1.0


@given(st.lists(st.text("abc", max_size=6), min_size=1, max_size=8), st.randoms())
def test_the_order_of_documents_and_words_changes_no_score(
    texts: list[str], chance: random.Random
) -> None:
    order = list(range(len(texts)))
    chance.shuffle(order)
    one = ranking.build_postings(map(Counter, texts))
    other = ranking.build_postings(Counter("".join(reversed(texts[index]))) for index in order)
    first, second = (
        ranking.bm25_scores(held, query, held) for held, query in ((one, "abc"), (other, "cba"))
    )
    assert first[order].tobytes() == second.tobytes()


def test_ranks_are_fused_as_by_hand() -> None:
    words_order, meaning_order = np.array([2, 0, 1]), np.array([0, 3])
    expected = {0: 1 / 62 + 1 / 61, 1: 1 / 63, 2: 1 / 61, 3: 1 / 62}
    by_hand = sorted(expected, key=lambda index: -expected[index])
    assert ranking.fuse_ranks([words_order, meaning_order], np.arange(5), 10).tolist() == by_hand
    assert ranking.fuse_ranks([words_order, meaning_order], np.arange(5), 2).tolist() == by_hand[:2]


def test_scores_that_differ_by_less_than_a_step_are_equal_and_ordered_by_place() -> None:
    scores = np.array([0.50001, 0.50002, 0.5002, 0.0, -1.0, 0.00004])
    assert ranking.rank_documents(scores, np.array([1, 0, 2, 3, 4, 5])).tolist() == [2, 1, 0]


@given(np_st.arrays(np.int8, st.tuples(st.integers(1, 40), st.just(256))), st.randoms())
def test_a_cosine_has_the_same_bits_however_its_sum_is_ordered(
    rows: NDArray[np.int8], chance: random.Random
) -> None:
    order = list(range(256))
    chance.shuffle(order)
    found = cosines(rows, rows[0])
    assert found.tobytes() == cosines(rows[:, order], rows[0][order]).tobytes()
    exact = rows.astype(np.int64) @ rows[0].astype(np.int64)
    squares = (rows.astype(np.int64) ** 2).sum(axis=1)
    for cosine, product, square in zip(found, exact, squares, strict=True):
        norm = math.sqrt(float(square) * float(squares[0]))
        assert cosine == (product / norm if norm else 0.0)


def test_vectors_too_long_for_exact_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="more than"):
        cosines(np.zeros((1, 2000), np.int8), np.zeros(2000, np.int8))


def test_directions_survive_their_way_to_whole_numbers() -> None:
    chance = np.random.default_rng(3)
    sums = chance.normal(size=(50, 256)) * chance.uniform(1, 1e6, size=(50, 1))
    rows = quantise(sums)
    norms = np.linalg.norm(sums, axis=1) * np.linalg.norm(rows.astype(float), axis=1)
    assert ((sums * rows).sum(axis=1) / norms).min() > 0.999
    assert quantise(np.zeros((1, 4))).tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("parse_HTTPHeader2", ["parse", "http", "header", "2"]),
        ("getURL XMLHttpRequest", ["get", "url", "xml", "http", "request"]),
        ("a b i += 1", ["1"]),
        ("naïve Größe 日本", ["na", "ve", "gr"]),
        ("x" * 100, ["x" * 32]),
        ("", []),
    ],
)
def test_identifiers_are_cut_where_their_case_changes(text: str, expected: list[str]) -> None:
    assert split_words(text) == expected
