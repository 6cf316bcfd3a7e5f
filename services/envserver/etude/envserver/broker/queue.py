"""Who waits for environments, and whose turn it is."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.v1 import environments_pb2


class BatchKey(NamedTuple):
    """What makes two requests the same."""

    run_id: str
    idempotency_key: str


@dataclass(slots=True, eq=False)
class Batch:
    """One launch request: one entry of the queue, however many environments it asks for."""

    key: BatchKey
    request: environments_pb2.LaunchBatchRequest
    digest: str
    submitted_s: float
    deadline_s: float
    waiting: deque[int] = field(default_factory=deque)
    """Indices without a slot."""
    tries: dict[int, int] = field(default_factory=dict)
    """Nodes that failed an index."""
    outcomes: dict[int, environments_pb2.LaunchBatchResponse] = field(default_factory=dict)
    """In the order of their arrival."""


class Turn(NamedTuple):
    """One environment of a batch whose turn it is."""

    batch: Batch
    position: int
    """Its index in the batch."""


@dataclass(slots=True)
class Queue:
    """Runs take turns, one environment each; inside a run, first come, first served."""

    _runs: OrderedDict[str, deque[Batch]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return sum(len(batch.waiting) for batch in self.batches())

    def batches(self) -> Iterator[Batch]:
        """Every batch with somebody waiting."""
        return (batch for run in self._runs.values() for batch in run)

    def add(self, batch: Batch) -> None:
        """Put a batch at the end of its run's line; without anybody waiting it is not put there."""
        run = self._runs.setdefault(batch.key.run_id, deque())
        if batch.waiting and batch not in run:
            run.append(batch)
        self._forget_empty(batch.key.run_id)

    def put_back(self, turn: Turn) -> None:
        """A node failed: the environment is next in its run."""
        turn.batch.waiting.appendleft(turn.position)
        run = self._runs.setdefault(turn.batch.key.run_id, deque())
        if turn.batch not in run:
            run.appendleft(turn.batch)

    def remove(self, batch: Batch) -> list[int]:
        """Take a batch out; returns the indices that still waited."""
        waiting = list(batch.waiting)
        batch.waiting.clear()
        run = self._runs.get(batch.key.run_id)
        if run is not None and batch in run:
            run.remove(batch)
        self._forget_empty(batch.key.run_id)
        return waiting

    def take(self, count: int) -> list[Turn]:
        """The next so many environments."""
        turns: list[Turn] = []
        while self._runs and len(turns) < count:
            run_id, run = next(iter(self._runs.items()))
            batch = run[0]
            turns.append(Turn(batch, batch.waiting.popleft()))
            if not batch.waiting:
                run.popleft()
            self._runs.move_to_end(run_id)
            self._forget_empty(run_id)
        return turns

    def _forget_empty(self, run_id: str) -> None:
        if not self._runs.get(run_id, True):
            del self._runs[run_id]
