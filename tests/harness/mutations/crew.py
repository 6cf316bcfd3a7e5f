"""Many benches beside each other: what becomes of a list of changes."""

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.harness.mutations.api import Api
from tests.harness.mutations.cases import Mutation
from tests.harness.mutations.checkpoints import CheckpointBench
from tests.harness.mutations.lab import Bench, Outcome, Verdict

from etude.common.api.schema import crd

EVERY = 20
"""Changes after each of which the crew says how far it is."""


class Crew(NamedTuple):
    """Benches beside each other for objects of one kind."""

    api: Api
    kind: crd.CrdKind
    benches: int
    say: Callable[[str], None]

    def bench(self, variant: str = "") -> Bench:
        """A namespace with the base object in it."""
        kind = CheckpointBench if self.kind is crd.CHECKPOINT else Bench
        return kind(self.api, self.kind, variant)

    def shown(self, taken: Sequence[Mutation]) -> list[Outcome]:
        """What becomes of changes that the API server takes.

        Raises:
            AssertionError: a bench could not be made.
        """
        left: queue.SimpleQueue[Mutation] = queue.SimpleQueue()
        for mutation in sorted(taken, key=lambda each: each.variant):
            left.put(mutation)
        done: list[Outcome] = []
        crashes: list[str] = []

        def work() -> None:
            try:
                self._work(left, done, len(taken))
            except Exception:  # noqa: BLE001 - a thread's end is told by the one that waits for it
                crashes.append(traceback.format_exc())

        threads = [threading.Thread(target=work) for _ in range(self.benches)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not crashes, crashes
        return done

    def _work(self, left: "queue.SimpleQueue[Mutation]", done: list[Outcome], whole: int) -> None:
        """Take one change after the other; a bench that is left in disorder is replaced."""
        bench: Bench | None = None
        while (mutation := _next(left)) is not None:
            if bench is not None and bench.variant != mutation.variant:
                bench.close()
                bench = None
            bench = bench or self.bench(mutation.variant)
            try:
                outcome = bench.tried(mutation)
            except Exception:  # noqa: BLE001 - whatever it is belongs to this change
                outcome = Outcome(mutation, Verdict.SHOWN, (traceback.format_exc()[-1_500:],))
            done.append(outcome)
            if outcome.faults:
                self.say(f"{mutation}: {outcome.verdict}: {outcome.faults}")
            if len(done) % EVERY == 0:
                self.say(f"{self.kind.name}: {len(done)} of {whole} led there and back")
            if outcome.leaves_disorder:
                bench.close()
                bench = None
        if bench is not None:
            bench.close()


def outcomes(crew: Crew, wanted: Sequence[Mutation]) -> list[Outcome]:
    """What becomes of each change: it is refused, or led there and back."""
    done: list[Outcome] = []
    taken: list[Mutation] = []
    bench = crew.bench()
    for mutation in wanted:
        refusal = bench.refused(mutation)
        if refusal is None:
            taken.append(mutation)
            continue
        done.append(refusal)
        if refusal.faults:
            crew.say(f"{mutation}: {refusal.faults}")
    bench.close()
    crew.say(f"{crew.kind.name}: {len(done)} refused, {len(taken)} to lead there and back")
    return [*done, *crew.shown(taken)]


def _next(left: "queue.SimpleQueue[Mutation]") -> Mutation | None:
    try:
        return left.get_nowait()
    except queue.Empty:
        return None
