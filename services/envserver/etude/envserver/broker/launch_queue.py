"""Queue of launches: fair between runs by deficit round robin."""

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.pinned_images import pinned_digest
from etude.v1 import environments_pb2

QUANTUM_CPU_MS = 200.0
"""CPU time of the hosts that a run without a deadline gets before the next run's turn."""
MOST_URGENT = 4.0
"""Factor for a run that is late."""


class BatchKey(NamedTuple):
    """Identity of a request: two with the same key are one."""

    run_id: str
    idempotency_key: str


class BatchPart(NamedTuple):
    """Part of a batch that another broker asks for, which has no room for it."""

    indices: tuple[int, ...] = ()
    """Empty for all."""
    wait_s: float = 0.0
    """Longest wait for slots; 0 for that of the request."""


WHOLE_BATCH = BatchPart()
"""The batch that a client asks for."""


class PlacementClass(NamedTuple):
    """Environments of one run for which the same hosts are equally good."""

    template: str
    snapshot_id: str = ""
    image: str = ""
    """Digest of the image that the task names by it."""


@dataclass(slots=True, eq=False)
class LaunchBatch:
    """One launch request: one entry of the queue, however many environments it asks for."""

    key: BatchKey
    request: environments_pb2.LaunchBatchRequest
    digest: str
    submitted_s: float
    deadline_s: float
    """Waiting environments fail with QueueTimeout then."""
    waiting: deque[int] = field(default_factory=deque)
    """Indices without a slot."""
    due_s: float | None = None
    """When the client needs the last of them, if it has a deadline."""
    tries: dict[int, int] = field(default_factory=dict)
    """Hosts that failed an index."""
    outcomes: dict[int, environments_pb2.LaunchBatchResponse] = field(default_factory=dict)
    """In the order of their arrival."""
    size: int = 0
    """Environments that are asked of this broker: all of the request, unless others have some."""
    placement_class: PlacementClass = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.size or self.request.count
        self.placement_class = PlacementClass(
            self.request.template,
            self.request.snapshot_id,
            pinned_digest(self.request.image),
        )


class Offer(NamedTuple):
    """A host where an environment could start now, and the CPU time that it would cost."""

    node_id: str
    cpu_ms: float


class Turn(NamedTuple):
    """One environment of a batch whose turn it is."""

    batch: LaunchBatch
    position: int
    """Its index in the batch."""
    offer: Offer


Offers = Callable[[LaunchBatch], Offer | None]
"""Offers a host for the next environment of a batch; None: no host, nor for its class."""


def urgency(batch: LaunchBatch, *, now_s: float) -> float:
    """Factor on a run's share for a batch: 1 without a deadline, at most 4."""
    if batch.due_s is None:
        return 1.0
    slack_s = batch.due_s - now_s
    if slack_s <= 0:
        return MOST_URGENT
    return min(MOST_URGENT, 1 + max(0.0, now_s - batch.submitted_s) / slack_s)


@dataclass(slots=True)
class _Entries:
    """Batches of one placement class. It keeps its turn for those present when the turn began."""

    batches: OrderedDict[BatchKey, LaunchBatch] = field(default_factory=OrderedDict)
    gate: int = 0
    """Batches left of the present turn; 0 before it begins."""


@dataclass(slots=True)
class _Run:
    """Placement classes of one run; the first has the turn."""

    lines: OrderedDict[PlacementClass, _Entries] = field(default_factory=OrderedDict)
    waiting: int = 0
    deficit_ms: float = 0.0
    """CPU time that it may use in the present visit."""
    is_visited: bool = False


@dataclass(slots=True)
class LaunchQueue:
    """Runs take turns by deficit round robin; inside a run batches of one template go together.

    Every run weighs the same. Its share grows while a batch of it is urgent.

    Source: Shreedhar and Varghese, https://doi.org/10.1109/90.502236.
    """

    _runs: OrderedDict[str, _Run] = field(default_factory=OrderedDict)
    _waiting: int = 0

    def __len__(self) -> int:
        return self._waiting

    def batches(self) -> Iterator[LaunchBatch]:
        """Every batch with waiting environments."""
        return (
            batch
            for run in self._runs.values()
            for entries in run.lines.values()
            for batch in entries.batches.values()
        )

    def add(self, batch: LaunchBatch) -> None:
        """Append a batch to its placement class, unless nothing of it waits."""
        if not batch.waiting:
            return
        run = self._runs.setdefault(batch.key.run_id, _Run())
        entries = run.lines.setdefault(batch.placement_class, _Entries())
        entries.batches[batch.key] = batch
        self._count(run, len(batch.waiting))

    def requeue(self, turn: Turn) -> None:
        """Requeue a turn whose host failed: first in its run, which gets its CPU time back."""
        batch = turn.batch
        batch.waiting.appendleft(turn.position)
        run = self._runs.setdefault(batch.key.run_id, _Run())
        run.deficit_ms += turn.offer.cpu_ms
        entries = run.lines.setdefault(batch.placement_class, _Entries())
        if batch.key not in entries.batches:
            entries.batches[batch.key] = batch
            entries.batches.move_to_end(batch.key, last=False)
            entries.gate += entries.gate > 0
        run.lines.move_to_end(batch.placement_class, last=False)
        self._count(run, 1)

    def remove(self, batch: LaunchBatch) -> list[int]:
        """Remove a batch; returns the indices that still waited."""
        waiting = list(batch.waiting)
        batch.waiting.clear()
        run = self._runs.get(batch.key.run_id)
        if run is not None and waiting:
            self._count(run, -len(waiting))
            self._leave(run, batch)
        return waiting

    def withdraw(self, batch: LaunchBatch, position: int) -> bool:
        """Remove one environment; False if it does not wait."""
        run = self._runs.get(batch.key.run_id)
        if run is None or position not in batch.waiting:
            return False
        batch.waiting.remove(position)
        self._count(run, -1)
        if not batch.waiting:
            self._leave(run, batch)
        return True

    def take(self, offers: Offers, *, now_s: float) -> Generator[Turn, None, None]:
        """Turns until the queue is empty or nothing is offered; stop early by closing the iterator.

        A turn that was taken is paid for. The queue must not be changed between two turns, but
        what is offered must: each turn uses up what it was offered.
        """
        full: set[_Full] = set()
        aside: list[tuple[str, _Run]] = []
        try:
            while self._runs:
                run_id, run = next(iter(self._runs.items()))
                found = _first_offer(run_id, run, offers, full)
                if found is None:
                    # Its visit goes on as soon as there is room for it.
                    aside.append((run_id, self._runs.pop(run_id)))
                    continue
                batch, offer = found
                if not run.is_visited:
                    run.is_visited = True
                    run.deficit_ms += QUANTUM_CPU_MS * urgency(batch, now_s=now_s)
                if offer.cpu_ms > run.deficit_ms:
                    run.is_visited = False
                    self._runs.move_to_end(run_id)
                    continue
                run.deficit_ms -= offer.cpu_ms
                yield Turn(batch, self._next_index(run, batch), offer)
        finally:
            for run_id, run in reversed(aside):
                self._runs[run_id] = run
                self._runs.move_to_end(run_id, last=False)

    def _next_index(self, run: _Run, batch: LaunchBatch) -> int:
        entries = run.lines[batch.placement_class]
        if not entries.gate:
            entries.gate = len(entries.batches)
        index = batch.waiting.popleft()
        self._count(run, -1)
        if not batch.waiting:
            self._leave(run, batch)
        return index

    def _leave(self, run: _Run, batch: LaunchBatch) -> None:
        """Remove a batch of which nothing waits any more."""
        entries = run.lines.get(batch.placement_class)
        if entries is None or entries.batches.pop(batch.key, None) is None:
            return
        entries.gate = max(0, entries.gate - 1)
        if not entries.batches:
            del run.lines[batch.placement_class]
        elif not entries.gate:
            run.lines.move_to_end(batch.placement_class)
        if not run.lines:
            # An empty run saves nothing up.
            del self._runs[batch.key.run_id]

    def _count(self, run: _Run, change: int) -> None:
        run.waiting += change
        self._waiting += change


class _Full(NamedTuple):
    """A placement class for which there is no room now; a snapshot's belongs to one run."""

    line: PlacementClass
    run_id: str


class _BatchOffer(NamedTuple):
    batch: LaunchBatch
    offer: Offer


def _first_offer(run_id: str, run: _Run, offers: Offers, full: set[_Full]) -> _BatchOffer | None:
    """The first batch of a run for which there is room."""
    for line, entries in run.lines.items():
        here = _Full(line, run_id if line.snapshot_id else "")
        if here in full:
            continue
        batch = next(iter(entries.batches.values()))
        offer = offers(batch)
        if offer is not None:
            return _BatchOffer(batch, offer)
        full.add(here)
    return None
