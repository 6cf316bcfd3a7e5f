"""Training of the encoder for code search, and the questions that it learns from."""

import ast
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

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


def spoken() -> list[tuple[str, str]]:
    """Questions whose words are never in their answers: only training can tell."""
    chance = random.Random(2)
    letters = "abcdefghijklmnopqrstuvwxyz"
    asked, answered = (["".join(chance.choices(letters, k=6)) for _ in range(40)] for _ in range(2))
    pairs = []
    for _ in range(400):
        topics = chance.sample(range(40), 3)
        pairs.append((" ".join(asked[t] for t in topics), " ".join(answered[t] for t in topics)))
    return pairs


def train(bench: Import, seed: int) -> TrainedEmbedder:
    training, lessons = bench("training"), bench("lessons")
    recipe = training.Recipe(
        seed=seed,
        num_words=200,
        width=32,
        inner=32,
        sums=training.Stage(passes=10, batch=64, learning_rate=0.02),
        layers=training.Stage(passes=2, batch=64, learning_rate=0.002, num_wrong=1),
        dropout=0.0,
    )
    texts = lessons.Texts()
    numbers = [[texts.append(count_words(text).counts) for text in pair] for pair in spoken()]
    learned = [
        lessons.Lesson(f"package {index % 7}", question, answer, [numbers[index - 1][1]])
        for index, (question, answer) in enumerate(numbers)
    ]
    return TrainedEmbedder.of(training.train(learned, texts, recipe, lambda line: None))


def test_a_question_finds_an_answer_that_shares_no_word_with_it(bench: Import) -> None:
    encoder, known = train(bench, 0), spoken()[:100]
    rows = encoder.embed([count_words(answer) for _, answer in known])
    hits = [
        index in np.argsort(-cosines(rows, encoder.embed_query(count_words(question))))[:3]
        for index, (question, _) in enumerate(known)
    ]
    assert sum(hits) > 90


def test_the_same_seed_makes_the_same_encoder(bench: Import) -> None:
    assert train(bench, 1).id == train(bench, 1).id != train(bench, 2).id


def test_whole_numbers_are_what_torch_trained(bench: Import) -> None:
    encoder, training = bench("encoder"), bench("training")
    torch.manual_seed(3)
    words = [f"w{chr(97 + n)}" for n in range(20)]
    model = encoder.Encoder(torch.randn(20, 32), 2, 64)
    for each in model.parameters():
        if each.ndim == 2 and each.shape[0] != 20:
            torch.nn.init.normal_(each, std=0.2)
    made = TrainedEmbedder.of(model.quantise(words))
    texts = [count_words(text) for text in ("wa wb wc", "wd wa wd wd we", "wf " * 9 + "wg")]
    for text in texts:
        found = made.words.read(text.counts)
        weights = torch.tensor([[training.weigh(count) for count in found.values()]])
        batch = encoder.Batch(torch.tensor([list(found)]), weights)
        for kind, row in enumerate((made.embed([text])[0], made.embed_query(text))):
            exact = model(batch, kind, 2).detach().numpy()[0]
            assert exact @ row / np.linalg.norm(row) > 0.999


def test_wrong_chunks_are_of_the_package_and_no_answers(bench: Import) -> None:
    corpus, lessons, questions = bench("corpus"), bench("lessons"), bench("questions")
    body = "".join(f"    items = items + [price * {n}]\n" for n in range(20))
    files = [
        corpus.File("shop", f"shop/m{n}.py", f'def f{n}(items, price):\n    """{text}"""\n{body}')
        for n, text in enumerate(("Adds up the prices of items.", "Sends all the items away."))
    ]
    answers = [answer for file in files for answer in questions.answers(file)]
    chosen = lessons.choose(answers, {"Sends all the items away."}, 10, seed=0)
    texts = lessons.Texts()
    (one,) = lessons.add_lessons(files[:1], chosen, texts)
    assert one.wrong == []
    lesson, other = lessons.add_lessons(files, lessons.choose(answers, set(), 10, seed=0), texts)
    assert lesson.wrong == [other.answer]
    assert other.wrong == [lesson.answer]
    words = list(texts.words)
    read = [words[number] for number, _ in texts.text(one.answer)]
    assert read == ["shop", "0", "py", "def", "items", "price", *map(str, range(1, 20))]


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
