"""Queue of launches by class: classes share slots, and inside a class the runs take turns."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field

from etude.common.api.pool.lease_classes import LeaseClass
from etude.common.demand import DemandPeak, units_needed
from etude.envserver.broker.classes.preemption import PREEMPTED_CLASSES
from etude.envserver.broker.classes.shares import ClassRule, ClassShares, lease_class
from etude.envserver.broker.launch_queue import LaunchBatch, LaunchQueue, Offers, Turn
from etude.v1 import environments_pb2


def class_rules(classes: tuple[LeaseClass, ...]) -> dict[int, ClassRule]:
    """Rules of a pool's classes."""
    return {
        environments_pb2.LeaseClass.Value(f"LEASE_CLASS_{each.name.upper()}"): ClassRule(
            each.weight, each.floor_slots, each.headroom_seconds
        )
        for each in classes
    }


@dataclass(slots=True)
class ClassQueues:
    """A launch queue for each class."""

    shares: ClassShares = field(default_factory=ClassShares)
    leased: Mapping[int, int] = field(default_factory=dict)
    """Living leases of each class that take a slot, kept by the ledger."""
    num_brokers: Callable[[], int] = field(default=lambda: 1)
    """Number of brokers that share the floors."""
    _queues: dict[int, LaunchQueue] = field(default_factory=dict)
    _ordered: Counter[int] = field(default_factory=Counter)
    """Environments that hosts were asked for, by class."""
    _peaks: dict[int, DemandPeak] = field(default_factory=dict)
    """Of classes whose floors hold free slots."""
    _recorded_s: float | None = None

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def batches(self) -> Iterator[LaunchBatch]:
        """Every batch with waiting environments."""
        return (batch for queue in self._queues.values() for batch in queue.batches())

    def batches_of(self, each: int) -> Iterator[LaunchBatch]:
        """Batches of one class with waiting environments."""
        return self._queues[each].batches() if each in self._queues else iter(())

    def count_waiting(self) -> Counter[int]:
        """Waiting environments of each class."""
        return Counter({each: len(queue) for each, queue in self._queues.items()})

    def add(self, batch: LaunchBatch) -> None:
        """Append a batch, unless nothing of it waits."""
        self._queue(batch).add(batch)
        each = _class_of(batch)
        if each in self._people():
            demand = self.count_held()[each] + len(self._queue(batch))
            self._peak(each).record(demand, now_s=batch.submitted_s)

    def requeue(self, turn: Turn) -> None:
        """Requeue a turn whose host failed."""
        self._queue(turn.batch).requeue(turn)

    def remove(self, batch: LaunchBatch) -> list[int]:
        """Remove a batch; returns the indices that still waited."""
        return self._queue(batch).remove(batch)

    def withdraw(self, batch: LaunchBatch, position: int) -> bool:
        """Remove one environment; False if it does not wait."""
        return self._queue(batch).withdraw(batch, position)

    def settle(self, batch: LaunchBatch, count: int) -> None:
        """Record that a host has answered an order: what it opened is leased."""
        self._ordered[_class_of(batch)] -= count

    def record_use(self, *, now_s: float) -> None:
        """Count the slots that each class has held since the last call."""
        passed_s = 0.0 if self._recorded_s is None else now_s - self._recorded_s
        self._recorded_s = now_s
        waiting = [each for each, queue in self._queues.items() if len(queue)]
        self.shares.record_use(self.count_held(), waiting, passed_s=passed_s)

    def take(self, offers: Offers, *, now_s: float, spare: int) -> Generator[Turn, None, None]:
        """Turns until the queue is empty or nothing is offered; stop early by closing the iterator.

        Each turn that was taken has to be settled.

        Args:
            offers: of hosts.
            now_s: monotonic time.
            spare: most turns of classes that are not below their floors.
        """
        turns = {
            each: queue.take(offers, now_s=now_s)
            for each, queue in self._queues.items()
            if len(queue)
        }
        held, brokers = self.count_held(), self.num_brokers()
        try:
            while turns:
                each = self.shares.choose(turns, held, brokers=brokers)
                is_owed = self.shares.is_below_floor(each, held, brokers=brokers)
                if not is_owed and spare <= 0:
                    break
                turn = next(turns[each], None)
                if turn is None:
                    del turns[each]
                    continue
                spare -= not is_owed
                held[each] += 1
                self._ordered[each] += 1
                yield turn
        finally:
            for left in turns.values():
                left.close()

    def count_held(self) -> Counter[int]:
        """Slots of each class, ordered ones included."""
        return Counter(self.leased) + self._ordered

    def num_reserved(self, *, now_s: float) -> int:
        """Free slots that are kept for people who may come, below the floors of their classes."""
        held, brokers = self.count_held(), self.num_brokers()
        reserved = 0
        for each in self._people():
            demand = held[each] + len(self._queues.get(each, ()))
            window_s = self.shares.rules[each].headroom_s
            peak = max(demand, self._peak(each).highest(now_s=now_s, window_s=window_s))
            needed = min(units_needed(peak), self.shares.floor(each, brokers))
            reserved += max(0, needed - held[each])
        return reserved

    def _peak(self, each: int) -> DemandPeak:
        return self._peaks.setdefault(each, DemandPeak())

    def _people(self) -> list[int]:
        """Classes whose floors hold free slots: their leases cannot wait as rollouts do."""
        return [
            each
            for each, rule in self.shares.rules.items()
            if rule.floor and rule.headroom_s and each not in PREEMPTED_CLASSES
        ]

    def _queue(self, batch: LaunchBatch) -> LaunchQueue:
        return self._queues.setdefault(_class_of(batch), LaunchQueue())


def _class_of(batch: LaunchBatch) -> int:
    return lease_class(batch.request.lease_class)
