"""Training of a table of word vectors on questions and the code that answers them.

The vector of a text is the sum of its words' rows, so all there is to learn is one row per word: a
question's sum shall be nearer to its own answer's than to every other one's of the batch.

Source: InfoNCE, van den Oord et al., https://arxiv.org/abs/1807.03748; sums of word vectors for
code, Sachdev et al., "Retrieval on source code: a neural code search" (MAPL 2018).
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from etude.agent.search.tokens import split_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that the result depends on, beside the corpus."""

    seed: int = 0
    num_words: int = 24_000
    num_components: int = 128
    min_texts: int = 4
    """A word in fewer texts has no row."""
    batch: int = 1024
    epochs: int = 6
    """Passes over the pairs."""
    learning_rate: float = 0.01
    temperature: float = 0.05
    dropout: float = 0.2
    """Share of an answer's words that are left out at random."""
    max_distinct_words: int = 160


class Pair(NamedTuple):
    """Words of a question, and of its answer."""

    question: Counter[str]
    answer: Counter[str]


class Table(NamedTuple):
    """One row per word."""

    words: list[str]
    rows: NDArray[np.float32]


class _Bags(NamedTuple):
    """Texts as lists of rows with their weights, one after the other."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    starts: NDArray[np.int64]


def weight(count: int) -> float:
    """How much a word counts that stands in a text so many times."""
    return 1 + math.log(count)


def pair(question: str, answer: str) -> Pair:
    """Texts, as training sees them."""
    return Pair(Counter(split_words(question)), Counter(split_words(answer)))


def vocabulary(pairs: Iterable[Pair], recipe: Recipe) -> Counter[str]:
    """The words that get a row, with the number of texts that hold them."""
    texts: Counter[str] = Counter()
    for each in pairs:
        texts.update(each.question.keys() | each.answer.keys())
    ordered = sorted(texts.items(), key=lambda item: (-item[1], item[0]))[: recipe.num_words]
    return Counter({word: count for word, count in ordered if count >= recipe.min_texts})


def train(pairs: Sequence[Pair], recipe: Recipe, tell: Callable[[float], None]) -> Table:
    """The table after the last pass over the pairs.

    Args:
        pairs: what is learnt.
        recipe: how.
        tell: takes the mean loss of each pass.
    """
    torch.manual_seed(recipe.seed)
    torch.use_deterministic_algorithms(True)  # noqa: FBT003 - torch's signature
    known = vocabulary(pairs, recipe)
    ids = {word: index for index, word in enumerate(known)}
    table = torch.nn.Parameter(_first_rows(known, len(pairs), recipe))
    questions = _bags([p.question for p in pairs], ids, recipe)
    answers = _bags([p.answer for p in pairs], ids, recipe)
    optimiser = torch.optim.Adam([table], lr=recipe.learning_rate)
    order = list(range(len(pairs)))
    steps = recipe.epochs * (len(pairs) // recipe.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / (steps + 1))
    shuffle = random.Random(recipe.seed)  # noqa: S311 - an order, no secret
    for _ in range(recipe.epochs):
        shuffle.shuffle(order)
        losses = []
        for start in range(0, len(order) - recipe.batch + 1, recipe.batch):
            some = order[start : start + recipe.batch]
            asked = _vectors(table, questions, some, 0.0)
            found = _vectors(table, answers, some, recipe.dropout)
            loss = _loss(asked, found, recipe.temperature)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch says nothing about it
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        tell(math.fsum(losses) / max(1, len(losses)))
    return Table(list(ids), table.detach().numpy())


def _first_rows(known: Counter[str], num_texts: int, recipe: Recipe) -> Tensor:
    """Random directions, longer for rarer words."""
    rarity = [math.log(1 + 2 * num_texts / count) for count in known.values()]
    rows = torch.randn(len(known), recipe.num_components) / math.sqrt(recipe.num_components)
    return rows * torch.tensor(rarity)[:, None] / max(rarity)


def _bags(texts: Sequence[Counter[str]], ids: dict[str, int], recipe: Recipe) -> _Bags:
    kept = [
        list(
            itertools.islice(
                ((ids[w], weight(n)) for w, n in text.items() if w in ids),
                recipe.max_distinct_words,
            )
        )
        for text in texts
    ]
    flat = [item for bag in kept for item in bag]
    return _Bags(
        np.array([index for index, _ in flat], np.int64),
        np.array([number for _, number in flat], np.float32),
        np.cumsum([0, *map(len, kept)]),
    )


def _vectors(table: Tensor, bags: _Bags, some: Sequence[int], dropout: float) -> Tensor:
    pieces = [np.arange(bags.starts[index], bags.starts[index + 1]) for index in some]
    at = np.concatenate(pieces)
    offsets = np.cumsum([0, *map(len, pieces[:-1])])
    weights = torch.from_numpy(bags.weights[at])
    if dropout:
        weights = weights * (torch.rand(len(weights)) >= dropout)
    sums = functional.embedding_bag(
        torch.from_numpy(bags.ids[at]),
        table,
        torch.from_numpy(offsets),
        mode="sum",
        per_sample_weights=weights,
    )
    return functional.normalize(sums, dim=1)


def _loss(asked: Tensor, found: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of finding the answer by the question, and the question by the answer."""
    likeness = asked @ found.T / temperature
    own = torch.arange(len(asked))
    forth, back = (functional.cross_entropy(x, own) for x in (likeness, likeness.T))
    return (forth + back) / 2
