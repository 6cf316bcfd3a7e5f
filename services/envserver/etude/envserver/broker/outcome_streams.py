"""Streams of launch outcomes to the clients of a batch."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, field

from etude.common.errors import ReusedIdError
from etude.envserver.broker.classes.queues import ClassQueues
from etude.envserver.broker.launch_orders import failure_outcome, success_outcome
from etude.envserver.broker.launch_queue import BatchKey, LaunchBatch
from etude.envserver.broker.lease_ledger import LeaseLedger
from etude.v1 import environments_pb2


@dataclass(slots=True)
class OutcomeStream:
    """The outcomes of one batch, for its readers."""

    batch: LaunchBatch
    readers: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the next outcome, and then replaced."""

    async def follow(self) -> AsyncIterator[environments_pb2.LaunchBatchResponse]:
        """Every outcome once, as it arrives."""
        sent, count = 0, self.batch.size
        while sent < count:
            news = self.changed
            for outcome in list(self.batch.outcomes.values())[sent:]:
                sent += 1
                yield outcome
            if sent < count:
                await news.wait()


@dataclass(slots=True)
class OutcomeStreams:
    """All batches with readers."""

    _streams: dict[BatchKey, OutcomeStream] = field(default_factory=dict)
    _missing: dict[str, int] = field(default_factory=dict)
    """Environments without an outcome by run."""

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[OutcomeStream]:
        return iter(self._streams.values())

    @property
    def runs(self) -> Collection[str]:
        """Runs that wait for environments."""
        return self._missing.keys()

    def num_missing(self, run_id: str) -> int:
        """Environments that a run still waits for."""
        return self._missing.get(run_id, 0)

    def get(self, key: BatchKey) -> OutcomeStream | None:
        return self._streams.get(key)

    def open(self, batch: LaunchBatch) -> OutcomeStream:
        stream = self._streams[batch.key] = OutcomeStream(batch)
        self._count(batch.key.run_id, batch.size - len(batch.outcomes))
        return stream

    def has_reader(self, batch: LaunchBatch) -> bool:
        stream = self._streams.get(batch.key)
        return stream is not None and stream.batch is batch

    def deliver(self, batch: LaunchBatch, outcome: environments_pb2.LaunchBatchResponse) -> None:
        stream = self._streams.get(batch.key)
        if stream is None or stream.batch is not batch or outcome.index in batch.outcomes:
            return
        batch.outcomes[outcome.index] = outcome
        self._count(batch.key.run_id, -1)
        stream.changed.set()
        stream.changed = asyncio.Event()

    def remove_reader(self, stream: OutcomeStream) -> bool:
        """Remove a reader; True for the last one."""
        stream.readers -= 1
        if stream.readers > 0:
            return False
        batch = stream.batch
        del self._streams[batch.key]
        self._count(batch.key.run_id, len(batch.outcomes) - batch.size)
        return True

    def _count(self, run_id: str, change: int) -> None:
        left = self._missing.get(run_id, 0) + change
        if left:
            self._missing[run_id] = left
        else:
            self._missing.pop(run_id, None)


def deliver_adopted(ledger: LeaseLedger, streams: OutcomeStreams, queue: ClassQueues) -> None:
    """Deliver leases from heartbeats to the repeated requests that wait for them."""
    adopted, ledger.adopted = ledger.adopted, []
    for granted in adopted:
        stream, index = streams.get(granted.key), granted.held.index
        is_living = ledger.leases.get(granted.lease.lease_id) is granted
        if not is_living or stream is None or not queue.withdraw(stream.batch, index):
            continue
        if granted.held.request_digest == stream.batch.digest:
            granted.is_claimed = True
            outcome = success_outcome(index, granted.lease)
        else:
            reused = "the idempotency key was another request"
            outcome = failure_outcome(index, ReusedIdError.reason, reused)
        streams.deliver(stream.batch, outcome)
