"""A run whose store can be away, and what must be true of it in the end."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from tests.support.stores.store_faults import Fault, FaultyStore, Schedule
from tests.support.trainer_simulation.workers import SimulatedLearners

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.weights import VersionId, WeightManifest, read_manifest
from etude.trainer.controller.run import Run

SFT_STEPS = 4
RL_STEPS = 6
STALENESS = 4

STARTED = VersionId(1, 1)
"""With which the second phase begins; the one before is of the initial weights."""

MakeWorld = Callable[..., Any]


class Unsteady(FaultyStore):
    """A store in memory that can be away."""

    inner: MemoryStore

    def __init__(self, *, seed: int = 0, rates: dict[Fault, float] | None = None) -> None:
        def hits(call: str, key: str) -> bool:
            # Chance spares what has no patience: taking over, and checkpoints.
            is_patient = key.startswith(("weights/deltas/", "weights/manifests/", "journal/"))
            if rates is None:
                return key.startswith(self.only) and not key.startswith(self.spared)
            return is_patient and call in {"put", "create"}

        self.only = ""
        # Without rollouts that it has not fetched a learner takes no step: see the test of them.
        self.spared: tuple[str, ...] = ("contents/",)
        super().__init__(MemoryStore(), Schedule(seed=seed, rates=rates, hits=hits))

    @property
    def objects(self) -> dict[str, bytes]:
        return self.inner.objects

    def away(self, *, is_away: bool) -> None:
        self.faults.down(is_down=is_away)


def asynchronous(make_world: MakeWorld, backlog: int, store: Unsteady | None = None) -> Any:
    """A world whose run pauses for nothing but its end, and may be far ahead of its engines."""
    given = make_world(staleness=STALENESS, every_steps=100).spec
    given["evaluation"] = []
    given["weights"]["advanced"] = {"backlog": backlog, "retainVersions": 200}
    return make_world(store or Unsteady(), given=given)


def replace_learners(run: Run, learners: SimulatedLearners) -> None:
    """Give a run, its publishing and its checkpoints other learners."""
    run.learners = run.publishing.learners = run.checkpoints.saver.learners = learners


def learner_of(run: Run) -> SimulatedLearners:
    assert isinstance(run.learners, SimulatedLearners)
    return run.learners


def away_after(world: Any, step: int) -> Callable[[Run], None]:
    """The store is away from the end of a step of the second phase on."""

    def prepare(run: Run) -> None:
        def after_step() -> None:
            if len(learner_of(run).trained) == SFT_STEPS + step:
                world.store.away(is_away=True)

        learner_of(run).after_step = after_step

    return prepare


async def stalled(world: Any) -> Run:
    """The run, once it waits for its store."""
    seen = -1
    while True:
        await asyncio.sleep(0.3)
        if world.runs and world.store.faults._is_down:
            run: Run = world.runs[-1]
            if len(learner_of(run).trained) == seen:
                return run
            seen = len(learner_of(run).trained)


def chain(world: Any) -> list[WeightManifest]:
    return [read_manifest(world.store, v) for v in weights.accepted_chain(world.store)]


def steps(found: list[WeightManifest]) -> list[int]:
    """Of the second phase, of which versions are."""
    return [m.step - SFT_STEPS for m in found if m.number >= STARTED.number]


def assert_whole(world: Any) -> None:
    """Every manifest names the one before it, and the last one holds the learner's weights."""
    found = chain(world)
    for before, after in itertools.pairwise(found):
        assert after.base in {before.ref, None}
        assert after.number > before.number
    run = world.runs[-1]
    assert found[-1].version == VersionId(*run.progress.cursor.policy)
    words = learner_of(run).words
    assert found[-1].state == weights_state(words)
    assert world.audit(max_staleness=STALENESS).findings == []


def weights_state(words: Any) -> str:
    from etude.common.weights.tensors import digest  # noqa: PLC0415 - compiled when it is needed

    return digest.scan(words, 0).hex()
