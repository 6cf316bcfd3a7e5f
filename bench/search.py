"""Search of code by questions in words: the encoder of `make search-model` against BM25 and MiniLM.

python bench/search.py [--packages requests,click] [--questions 100] [--models runs/search-model]

Packages that no model was trained with lose all their docstrings, and each docstring becomes a
question: found is the chunk in which its function begins. BM25 alone is what every line is compared
with; each kind of vectors is judged fused with it, as search does, and alone. MiniLM costs fifty
times as much, so it is judged on the smallest packages, and all others on these once more.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from search_bench import corpus, lessons, questions
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
SMALL_BYTES = 1_000_000
"""Limit of the packages that MiniLM is judged on, together."""
WORDS = "BM25 alone"
RESAMPLES = 2_000


class NoVectors(Embedder):
    """No vectors: the order is BM25's alone."""

    id = "none"
    num_components = 1
    floor = 0.0
    max_texts = 0

    @override
    def embed(self, passages: Sequence[Passage]) -> Bytes:
        return np.zeros((len(passages), 1), np.int8)


class Repository(NamedTuple):
    """One package as it is searched, and its questions."""

    name: str
    files: Mapping[str, bytes]
    questions: Sequence[Answer]

    @property
    def num_bytes(self) -> int:
        """Size of its files."""
        return sum(map(len, self.files.values()))


@dataclass(kw_only=True)
class Line:
    """Answers and costs of one way of searching."""

    name: str
    chunks: int = 0
    source_bytes: int = 0
    vector_bytes: int = 0
    index_cpu_s: float = 0.0
    query_cpu_s: float = 0.0
    ranks: list[int] = field(default_factory=list)
    """Place of the answer, 0 for none among the first ten."""

    def recall(self, depth: int) -> float:
        """Share of questions that are answered by then."""
        return sum(0 < rank <= depth for rank in self.ranks) / max(1, len(self.ranks))

    @property
    def reciprocals(self) -> NDArray[np.float64]:
        """Reciprocal rank for each question, 0 where the answer is missing."""
        return np.array([1 / rank if rank else 0.0 for rank in self.ranks])

    @property
    def mrr(self) -> float:
        """Mean reciprocal rank."""
        return float(self.reciprocals.mean()) if self.ranks else 0.0

    @property
    def query_cpu_ms(self) -> float:
        """CPU time of one question."""
        return 1000 * self.query_cpu_s / max(1, len(self.ranks))

    def add(self, index: ChunkIndex, repository: Repository, spent_s: float) -> None:
        """Add the costs of an index."""
        self.chunks += len(index.chunks)
        self.source_bytes += repository.num_bytes
        self.vector_bytes += index.vectors.nbytes
        self.index_cpu_s += spent_s

    def figures(self) -> dict[str, object]:
        """All of it for a file."""
        mrr = {"mrr": self.mrr, "recall_1": self.recall(1), "recall_10": self.recall(10)}
        return asdict(self) | mrr | {"query_cpu_ms": self.query_cpu_ms}


def repositories(names: Sequence[str], most: int) -> Iterator[Repository]:
    """The packages without their docstrings."""
    packages: dict[str, list[corpus.File]] = {name: [] for name in names}
    for file in corpus.held_out_files():
        if file.package in packages:
            packages[file.package].append(file)
    for name, files in packages.items():
        answers = [answer for file in files for answer in questions.answers(file)]
        texts = [answer.question for answer in answers]
        asked = [answer for answer in answers if texts.count(answer.question) == 1]
        chosen = lessons.choose(asked, set(), most, seed=0)
        bare = {file.path: questions.without_docstrings(file.text).encode() for file in files}
        yield Repository(name, bare, chosen)


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


def measure(repositories: Sequence[Repository], embedder: Embedder) -> list[Line]:
    """The lines of one embedder: fused with BM25, and alone."""
    is_bm25 = isinstance(embedder, NoVectors)
    lines = [Line(name=WORDS if is_bm25 else f"{embedder.id} + BM25")]
    lines += [] if is_bm25 else [Line(name=f"{embedder.id} alone")]
    for repository in repositories:
        started_s = cpu_s()
        index = build_index(index_chunks(repository.files, embedder), embedder.num_components)
        spent_s = cpu_s() - started_s
        for line in lines:
            line.add(index, repository, spent_s)
            started_s = time.process_time()
            alone = line is not lines[0]
            line.ranks += [rank(index, a, embedder, alone=alone) for a in repository.questions]
            line.query_cpu_s += time.process_time() - started_s
    return lines


def cpu_s() -> float:
    """CPU time of this process and of the parsers that it ran."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def embedders(models: Path) -> Iterator[Embedder]:
    """Embedders that are fast, of those that this machine has."""
    yield NoVectors()
    yield HashedEmbedder()
    for path in sorted(models.glob("*.npz")):
        yield TrainedEmbedder.load(path)


def gain(line: Line, base: Line) -> str:
    """Interval of 95 % for the gain of MRR over another way, from resampled questions."""
    gains = line.reciprocals - base.reciprocals
    chance = np.random.default_rng(0)
    means = gains[chance.integers(len(gains), size=(RESAMPLES, len(gains)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{low:+.3f}..{high:+.3f}"


def table(title: str, lines: Sequence[Line]) -> Table:
    """Figures with their ratios to BM25 alone."""
    base = lines[0]
    shown = Table(title=f"{title}: {len(base.ranks)} questions, {base.chunks} chunks")
    shown.add_column("search")
    columns = ("recall@1", "recall@10", "MRR@10", "ratio", "gain, 95 %", "index, CPU-s/MB")
    for name in (*columns, "query, CPU-ms", "ratio", "vectors, MB"):
        shown.add_column(name, justify="right")
    for line in lines:
        shown.add_row(
            line.name,
            f"{line.recall(1):.3f}",
            f"{line.recall(10):.3f}",
            f"{line.mrr:.3f}",
            f"{line.mrr / max(1e-9, base.mrr):.2f}",
            gain(line, base),
            f"{1e6 * line.index_cpu_s / line.source_bytes:.2f}",
            f"{line.query_cpu_ms:.2f}",
            f"{line.query_cpu_ms / base.query_cpu_ms:.1f}",
            f"{line.vector_bytes / 1e6:.2f}",
        )
    return shown


def smallest(found: Sequence[Repository]) -> list[Repository]:
    """The smallest repositories that are together within the limit."""
    chosen, left = [], SMALL_BYTES
    for repository in sorted(found, key=lambda r: r.num_bytes):
        left -= repository.num_bytes
        if left >= 0:
            chosen.append(repository)
    return chosen


def summary(every: Sequence[Line], small: Sequence[Line]) -> dict[str, object]:
    """Figures of the file: of the small packages where MiniLM was judged, else of all."""
    has_minilm = any(line.name.startswith("minilm") for line in small)

    def mrr(lines: Sequence[Line], start: str, end: str) -> float | None:
        named = (x for x in lines if x.name.startswith(start) and x.name.endswith(end))
        return next((line.mrr for line in named), None)

    lines = small if has_minilm else every
    return {
        "mrr_ours": mrr(lines, "trained", "+ BM25"),
        "mrr_ours_alone": mrr(lines, "trained", "alone"),
        "mrr_bm25": mrr(lines, "BM25", ""),
        "mrr_minilm": mrr(lines, "minilm", "+ BM25"),
        "mrr_minilm_alone": mrr(lines, "minilm", "alone"),
        "mrr_ours_all_packages": mrr(every, "trained", "+ BM25"),
        "mrr_ours_alone_all_packages": mrr(every, "trained", "alone"),
        "mrr_bm25_all_packages": mrr(every, "BM25", ""),
        "all_packages": [line.figures() for line in every],
        "small_packages": [line.figures() for line in small],
    }


def main() -> None:
    """Measure, print, and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", default=PACKAGES)
    parser.add_argument("--questions", type=int, default=100, help="most per package")
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--no-minilm", action="store_true", help="leave the slow one out")
    given = parser.parse_args()
    console = Console(width=130)
    judged = list(repositories(given.packages.split(","), given.questions))
    every = [x for embedder in embedders(given.models) for x in measure(judged, embedder)]
    console.print(table("all packages", every))
    small: list[Line] = []
    try:
        slow = [] if given.no_minilm else [MiniLmEmbedder.load()]
    except UserError as error:
        slow = []
        console.print(f"left out: {error}")
    if slow:
        few = smallest(judged)
        small = [x for e in (*embedders(given.models), *slow) for x in measure(few, e)]
        console.print(table(", ".join(repository.name for repository in few), small))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(summary(every, small), indent=1))


if __name__ == "__main__":
    main()
