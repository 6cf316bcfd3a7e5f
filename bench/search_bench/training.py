"""Training of an encoder for code search: first the sums of its words, then its layers on top.

A question shall be nearer to its own answer than to the other answers of its batch, a part of which
is from the same package, and than to the wrong chunks of all lessons of the batch.

Source: InfoNCE, van den Oord et al., https://arxiv.org/abs/1807.03748.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from etude.agent.search.embedders.transformer import CODE, QUESTION
from etude.agent.search.embedders.weights import EncoderWeights
from etude.agent.search.embedders.word_rows import WordRows
from search_bench.encoder import Batch, Encoder
from search_bench.lessons import Lesson, Texts

_SMALL_BATCH = 64
"""Texts of about one length, computed together."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Passes over the lessons with the same settings."""

    passes: int
    batch: int
    learning_rate: float
    num_wrong: int = 0
    """Wrong chunks for each lesson."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that the result depends on, beside the lessons."""

    seed: int = 0
    num_words: int = 24_000
    min_texts: int = 4
    """A word in fewer texts has no row."""
    width: int = 128
    inner: int = 256
    num_layers: int = 2
    sums: Stage = Stage(passes=4, batch=1024, learning_rate=0.01)
    layers: Stage = Stage(passes=2, batch=256, learning_rate=0.001, num_wrong=1)
    temperature: float = 0.05
    dropout: float = 0.2
    """Share of a chunk's words that are left out at random."""
    together: int = 32
    """Lessons of one package that come one after the other."""


def weigh(count: int) -> float:
    """Weight of a word that stands in a text so many times."""
    return 1 + math.log(count)


class _Read(NamedTuple):
    """Texts as an encoder reads them, one after the other."""

    rows: NDArray[np.int64]
    weights: NDArray[np.float32]
    ends: NDArray[np.int64]


def train(
    lessons: Sequence[Lesson], texts: Texts, recipe: Recipe, report: Report
) -> EncoderWeights:
    """Train an encoder.

    Args:
        lessons: what is learned.
        texts: of the lessons.
        recipe: settings.
        report: takes a line for each part of a stage.
    """
    torch.manual_seed(recipe.seed)
    torch.use_deterministic_algorithms(True)  # noqa: FBT003 - torch's signature
    frequencies = texts.frequencies()[: recipe.num_words]
    known = [(word, count) for word, count in frequencies if count >= recipe.min_texts]
    words = [word for word, _ in known]
    read = _read(texts, WordRows(rows={word: row for row, word in enumerate(words)}))
    encoder = Encoder(_first_rows(known, len(texts), recipe), recipe.num_layers, recipe.inner)
    training = _Training(encoder, read, lessons, recipe, report)
    training.run(recipe.sums, num_layers=0)
    sizes = np.bincount(read.rows, minlength=len(words))
    squares = encoder.rows.detach().square().mean(dim=1).numpy()
    encoder.rescale(1 / math.sqrt(squares @ sizes / sizes.sum()))
    training.run(recipe.layers, num_layers=recipe.num_layers)
    return encoder.quantise(words)


def _first_rows(known: Sequence[tuple[str, int]], num_texts: int, recipe: Recipe) -> Tensor:
    """Random directions, longer for rarer words."""
    rarity = [math.log(1 + 2 * num_texts / count) for _, count in known]
    rows = torch.randn(len(known), recipe.width) / math.sqrt(recipe.width)
    return rows * torch.tensor(rarity)[:, None] / max(rarity)


def _read(texts: Texts, known: WordRows) -> _Read:
    words = list(texts.words)
    rows: list[int] = []
    weights: list[float] = []
    ends = [0]
    for number in range(len(texts)):
        found = known.read({words[word]: count for word, count in texts.text(number)})
        rows.extend(found)
        weights.extend(map(weigh, found.values()))
        ends.append(len(rows))
    return _Read(np.array(rows, np.int64), np.array(weights, np.float32), np.array(ends))


class _Training:
    """One encoder, and what it is trained on."""

    def __init__(
        self,
        encoder: Encoder,
        read: _Read,
        lessons: Sequence[Lesson],
        recipe: Recipe,
        report: Report,
    ) -> None:
        self.encoder, self.read, self.lessons = encoder, read, lessons
        self.recipe, self.report = recipe, report
        self.chance = random.Random(recipe.seed)  # noqa: S311 - an order, no secret
        self.dropped = np.random.default_rng(recipe.seed)
        self.num_layers = 0

    def run(self, stage: Stage, *, num_layers: int) -> None:
        """Train the first layers for all passes of a stage."""
        self.num_layers = num_layers
        optimiser = torch.optim.Adam(self.encoder.parameters(), lr=stage.learning_rate)
        per_pass = len(self.lessons) // stage.batch
        steps = stage.passes * per_pass
        warm = 1 + steps // 20
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: min((step + 1) / warm, 1 - step / (steps + 1))
        )
        order: list[Lesson] = []
        losses: list[float] = []
        for done in range(steps):
            if done % per_pass == 0:
                order = self._order()
            start = done % per_pass * stage.batch
            loss = self._loss(order[start : start + stage.batch], stage)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch says nothing about it
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
            if (done + 1) % max(1, per_pass // 4) == 0:
                mean = math.fsum(losses) / len(losses)
                self.report(f"{num_layers} layers, step {done + 1}: loss {mean:.4f}")
                losses.clear()

    def _order(self) -> list[Lesson]:
        """All lessons in a random order, some of one package together."""
        packages: dict[str, list[Lesson]] = {}
        for lesson in self.lessons:
            packages.setdefault(lesson.package, []).append(lesson)
        parts = []
        for found in packages.values():
            self.chance.shuffle(found)
            size = self.recipe.together
            parts += [found[start : start + size] for start in range(0, len(found), size)]
        self.chance.shuffle(parts)
        return [lesson for part in parts for lesson in part]

    def _loss(self, some: Sequence[Lesson], stage: Stage) -> Tensor:
        """Cross-entropy of finding the answer by the question, and the question by the answer."""
        answers = [lesson.answer for lesson in some]
        wrong = [
            number
            for lesson in some
            for number in self.chance.sample(
                list(lesson.wrong), min(stage.num_wrong, len(lesson.wrong))
            )
        ]
        asked = self._vectors([lesson.question for lesson in some], QUESTION)
        found = self._vectors([*answers, *wrong], CODE)
        likeness = asked @ found.T / self.recipe.temperature
        # Several questions have one answer where small functions stand in one chunk.
        same = torch.tensor(answers)[:, None] == torch.tensor([*answers, *wrong])[None, :]
        same[:, : len(some)].fill_diagonal_(0)
        likeness = likeness.masked_fill(same, -math.inf)
        own = torch.arange(len(some))
        back = functional.cross_entropy(likeness[:, : len(some)].T, own)
        return (functional.cross_entropy(likeness, own) + back) / 2

    def _vectors(self, numbers: Sequence[int], kind: int) -> Tensor:
        """Vectors of texts in their order.  [N, C]."""
        ends = self.read.ends
        sizes = [int(ends[number + 1] - ends[number]) for number in numbers]
        order = sorted(range(len(numbers)), key=sizes.__getitem__)
        parts = []
        for start in range(0, len(order), _SMALL_BATCH):
            batch = self._batch([numbers[at] for at in order[start : start + _SMALL_BATCH]], kind)
            parts.append(self.encoder(batch, kind, self.num_layers))
        at = torch.empty(len(order), dtype=torch.long)
        at[torch.tensor(order)] = torch.arange(len(order))
        return torch.cat(parts)[at]

    def _batch(self, numbers: Sequence[int], kind: int) -> Batch:
        texts = [self._words(number, kind) for number in numbers]
        shape = (len(texts), max(1, *map(len, texts)))
        ids, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        for at, words in enumerate(texts):
            ids[at, : len(words)] = self.read.rows[words]
            weights[at, : len(words)] = self.read.weights[words]
        return Batch(torch.from_numpy(ids), torch.from_numpy(weights))

    def _words(self, number: int, kind: int) -> NDArray[np.int64]:
        words = np.arange(self.read.ends[number], self.read.ends[number + 1])
        if kind == CODE:
            words = words[self.dropped.random(len(words)) >= self.recipe.dropout]
        return words
