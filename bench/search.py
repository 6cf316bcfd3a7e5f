"""Whether search finds the code that a docstring was written for, and what that costs.

python bench/search.py [--packages requests,click] [--questions 100] [--models runs/search-model]

Packages that no model was trained with lose all their docstrings, and each docstring becomes a
question: found is the chunk in which its function begins. BM25 alone is what every line is compared
with. Beside the fusion, each kind of vectors is judged by itself.
"""

import argparse
import json
import random
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from search_bench import corpus, questions
from search_bench.questions import Answer
from typing_extensions import override

from etude.agent.search import ranking
from etude.agent.search.embedders.hashed import HashedEmbedder
from etude.agent.search.embedders.interface import Bytes, Embedder
from etude.agent.search.embedders.minilm import MiniLmEmbedder
from etude.agent.search.embedders.trained import TrainedEmbedder
from etude.agent.search.index import ChunkIndex, build_index, index_chunks
from etude.agent.search.tokens import Passage, count_words
from etude.common.errors import UserError

OUT = Path(__file__).parent / "out" / "search.json"
MODELS = Path("runs/search-model")
PACKAGES = ",".join(corpus.JUDGED)
DEPTH = 10


class Nothing(Embedder):
    """No vectors: the order is BM25's alone."""

    id = "none"
    num_components = 1
    floor = 0.0

    @override
    def embed(self, passages: Sequence[Passage]) -> Bytes:
        return np.zeros((len(passages), 1), np.int8)

    @override
    def embed_query(self, question: Passage) -> Bytes:
        return np.zeros(1, np.int8)


class Repository(NamedTuple):
    """One package as it is searched, and what is asked of it."""

    name: str
    files: Mapping[str, bytes]
    asked: Sequence[Answer]


@dataclass(kw_only=True)
class Line:
    """What one way of searching found, and what it cost."""

    name: str
    chunks: int = 0
    index_cpu_s: float = 0.0
    query_cpu_ms: float = 0.0
    ranks: list[int] = field(default_factory=list)
    """Place of the answer, 0 for none among the first ten."""

    def recall(self, depth: int) -> float:
        """Share of questions that are answered by then."""
        return sum(0 < rank <= depth for rank in self.ranks) / max(1, len(self.ranks))

    @property
    def mean_reciprocal_rank(self) -> float:
        """Of the answer, 0 where it is missing."""
        return sum(1 / rank for rank in self.ranks if rank) / max(1, len(self.ranks))


def repositories(names: Sequence[str], most: int) -> Iterator[Repository]:
    """The packages without their docstrings."""
    found: dict[str, list[corpus.File]] = {name: [] for name in names}
    for file in corpus.held_out_files():
        if file.package in found:
            found[file.package].append(file)
    for name, files in found.items():
        answers = [answer for file in files for answer in questions.answers(file)]
        told = [answer.question for answer in answers]
        asked = [answer for answer in answers if told.count(answer.question) == 1]
        random.Random(name).shuffle(asked)  # noqa: S311 - a sample, no secret
        texts = {file.path: questions.without_docstrings(file.text).encode() for file in files}
        yield Repository(name, texts, asked[:most])


def rank(index: ChunkIndex, answer: Answer, embedder: Embedder, *, alone: bool) -> int:
    """The place of the answer's chunk."""
    found = index.score(count_words(answer.question), embedder, index.postings)
    places = np.arange(len(index.chunks))
    kinds = [found.meaning] if alone else [found.words, found.meaning]
    orders = [ranking.rank_documents(scores, places) for scores in kinds]
    for at, chosen in enumerate(ranking.fuse_ranks(orders, places, DEPTH), 1):
        chunk = index.chunks[chosen]
        if chunk.path == answer.path and chunk.start <= answer.line <= chunk.end:
            return at
    return 0


def measure(known: Sequence[Repository], embedder: Embedder) -> list[Line]:
    """The lines of one embedder: fused with BM25, and alone."""
    is_bm25 = isinstance(embedder, Nothing)
    lines = [Line(name="BM25 alone" if is_bm25 else f"{embedder.id} + BM25")]
    lines += [] if is_bm25 else [Line(name=f"{embedder.id} alone")]
    for repository in known:
        started_s = cpu_s()
        index = build_index(index_chunks(repository.files, embedder), embedder.num_components)
        spent_s = cpu_s() - started_s
        for line in lines:
            line.chunks += len(index.chunks)
            line.index_cpu_s += spent_s
            started_s = time.process_time()
            alone = line is not lines[0]
            line.ranks += [rank(index, a, embedder, alone=alone) for a in repository.asked]
            line.query_cpu_ms += 1000 * (time.process_time() - started_s)
    for line in lines:
        line.query_cpu_ms /= max(1, len(line.ranks))
    return lines


def cpu_s() -> float:
    """Of this process and of the parsers that it ran."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def embedders(models: Path, *, slow: bool) -> Iterator[Embedder]:
    """Every kind of vectors that this machine has."""
    yield Nothing()
    yield HashedEmbedder()
    for path in sorted(models.glob("*.npz")):
        yield TrainedEmbedder.load(path)
    try:
        if slow:
            yield MiniLmEmbedder.load()
    except UserError as error:
        Console().print(f"left out: {error}")


def table(lines: Sequence[Line]) -> Table:
    """Figures with their ratios to BM25 alone."""
    base = lines[0]
    shown = Table(title=f"{len(base.ranks)} questions, {base.chunks} chunks")
    for name in (
        "search",
        "recall@1",
        "recall@10",
        "MRR@10",
        "ratio",
        "index CPU-s",
        "query CPU-ms",
    ):
        shown.add_column(name, justify="left" if name == "search" else "right")
    for line in lines:
        shown.add_row(
            line.name,
            f"{line.recall(1):.3f}",
            f"{line.recall(10):.3f}",
            f"{line.mean_reciprocal_rank:.3f}",
            f"{line.mean_reciprocal_rank / max(1e-9, base.mean_reciprocal_rank):.2f}",
            f"{line.index_cpu_s:.1f}",
            f"{line.query_cpu_ms:.2f}",
        )
    return shown


def main() -> None:
    """Measure, print, and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", default=PACKAGES)
    parser.add_argument("--questions", type=int, default=100, help="most per package")
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--no-minilm", action="store_true", help="leave the slow one out")
    given = parser.parse_args()
    known = list(repositories(given.packages.split(","), given.questions))
    lines = [
        line
        for embedder in embedders(given.models, slow=not given.no_minilm)
        for line in measure(known, embedder)
    ]
    Console(width=110).print(table(lines))
    OUT.parent.mkdir(exist_ok=True)
    rows = [
        asdict(line)
        | {"recall_1": line.recall(1), "recall_10": line.recall(10)}
        | {"mrr_10": line.mean_reciprocal_rank}
        for line in lines
    ]
    OUT.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
