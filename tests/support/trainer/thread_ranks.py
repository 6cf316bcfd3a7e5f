"""Learner ranks that are threads of this process, and exchange objects."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any, TypeVar

from etude.trainer.learner.data.windows import RankExchange

T = TypeVar("T")


@dataclass(slots=True)
class ThreadRank:
    """One rank."""

    rank: int
    size: int
    values: list[Any]
    barrier: Barrier

    def gather_objects(self, value: T) -> list[T]:
        self.values[self.rank] = value
        self.barrier.wait(timeout=30)
        gathered = list(self.values)
        self.barrier.wait(timeout=30)
        return gathered


def run_thread_ranks(size: int, run: Callable[[RankExchange], T]) -> list[T]:
    """Run a function on each rank, and return their results in rank order."""
    values, barrier = [None] * size, Barrier(size)
    ranks = [ThreadRank(rank, size, values, barrier) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, ranks))
