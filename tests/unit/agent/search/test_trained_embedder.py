"""The table of word vectors: what it learns, from what, and that it does so again."""

import ast
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from etude.agent.search.embedders.interface import cosines
from etude.agent.search.embedders.trained import TrainedEmbedder
from etude.agent.search.tokens import count_words

BENCH = Path(__file__).parents[4] / "bench"
Import = Callable[[str], ModuleType]

SOURCE = '''\
"""A module about carts."""


class Cart:
    """Things that somebody wants to buy."""

    def total(self, items):
        """Sum the prices of all items in the cart.

        Args:
            items: what is in it.
        """
        prices = [item.price for item in items]
        return sum(prices)

    def short(self): return 1


def oneline(a): "Says nothing that is long enough"; return a
'''


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Import:
    monkeypatch.syspath_prepend(str(BENCH))
    return lambda name: importlib.import_module(f"search_bench.{name}")


def lessons() -> list[tuple[str, str]]:
    """Questions whose words are never in their answers: only training can tell."""
    chance = random.Random(2)
    letters = "abcdefghijklmnopqrstuvwxyz"
    asked, told = (
        ["".join(chance.choices(letters, k=6)) for _ in range(40)] for _ in ("asked", "told")
    )
    found = []
    for _ in range(400):
        topics = chance.sample(range(40), 3)
        found.append((" ".join(asked[t] for t in topics), " ".join(told[t] for t in topics)))
    return found


def trained(bench: Import, seed: int) -> TrainedEmbedder:
    training = bench("training")
    recipe = training.Recipe(
        seed=seed, num_words=200, num_components=32, batch=64, epochs=12, dropout=0.0
    )
    table = training.train([training.pair(*each) for each in lessons()], recipe, lambda loss: None)
    return TrainedEmbedder.quantise_rows(table.words, table.rows)


def test_a_question_finds_an_answer_that_shares_no_word_with_it(bench: Import) -> None:
    table, known = trained(bench, 0), lessons()[:100]
    rows = table.embed([count_words(answer) for _, answer in known])
    hits = [
        index in np.argsort(-cosines(rows, table.embed_query(count_words(question))))[:3]
        for index, (question, _) in enumerate(known)
    ]
    assert sum(hits) > 90


def test_the_same_seed_makes_the_same_table(bench: Import) -> None:
    assert trained(bench, 1).id == trained(bench, 1).id != trained(bench, 2).id


def test_no_package_is_judged_that_something_was_learnt_from(bench: Import) -> None:
    corpus = bench("corpus")
    learnt = {corpus._name(found) for found in corpus._packages()} - set(corpus.HELD_OUT)
    assert learnt >= {"numpy", "pydantic"}
    assert not set(corpus.TUNED) & set(corpus.JUDGED)
    assert not learnt & {"hypothesis", "etude", *corpus.HELD_OUT}
    assert not any(name.startswith("nvidia") for name in learnt)


def test_answers_are_code_without_its_docstring(bench: Import) -> None:
    corpus, questions = bench("corpus"), bench("questions")
    cart, found = questions.answers(corpus.File("shop", "shop/cart.py", SOURCE))
    assert cart.question == "Things that somebody wants to buy."
    assert found.question == "Sum the prices of all items in the cart."
    assert (found.name, found.line) == ("total", 7)
    assert "prices" in found.code
    assert "Args" not in found.code


def test_lines_stay_where_they_are_without_docstrings(bench: Import) -> None:
    bare = bench("questions").without_docstrings(SOURCE)
    assert bare.count("\n") == SOURCE.count("\n")
    assert "Sum the prices" not in bare
    assert "Things that" not in bare
    assert bare.splitlines()[12] == SOURCE.splitlines()[12]
    assert len(ast.parse(bare.replace("class Cart:\n", "class Cart:\n    pass\n")).body) == 2
    assert bench("questions").parsed("def broken(:") is None
