"""A run whose versions are refused or whose engines are damaged trains none of their tokens."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.trainer_simulation.workers import SimulatedLearners, SimulatedRollouts
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import FencedError
from etude.common.weights import VersionId, claim_epoch, mark_suspect, read_epoch
from etude.trainer.contents.measures import version_uses
from etude.trainer.controller.admission.quarantine_marks import QuarantineMarks, RedrawReason
from etude.trainer.controller.journal import write_ahead_log
from etude.trainer.controller.publishing.engines import Engines, VersionRefusedError
from etude.trainer.controller.run import Run, root_cause
from etude.v1 import journal_pb2

MakeWorld = Callable[..., Any]


@dataclass
class Scripted(Engines):
    """Refuses some versions, in the order in which they are published."""

    refused: frozenset[int] = frozenset()
    """Which of the versions offered."""
    offered: list[VersionId] = field(default_factory=list)
    went_back: list[VersionId] = field(default_factory=list)
    before_commit: Callable[[VersionId], None] = lambda _version: None

    @override
    async def activate(self, version: VersionId) -> None:
        self.before_commit(version)
        if version in self.offered:
            return
        self.offered.append(version)
        if len(self.offered) - 1 in self.refused:
            raise VersionRefusedError(f"version {version}: state differs")

    @override
    async def roll_back(self, version: VersionId) -> None:
        self.went_back.append(version)


def scripted(*refused: int) -> Scripted:
    return Scripted((), timeout_s=1.0, refused=frozenset(refused))


def dropped(world: Any) -> dict[str, int]:
    return dict(world.runs[-1].book.ledger.dropped)


async def test_a_refused_version_is_left_for_the_one_before_and_published_complete(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world, engines = make_world(), scripted(3)

    def prepare(run: Run) -> None:
        run.publishing.engines = engines

    assert await world.train(prepare)
    refused, anew = engines.offered[3:5]
    assert weights.list_quarantined(world.store) == {refused}
    record = read_epoch(world.store, 2)
    assert (record.reason, record.parent) == ("rollback", engines.offered[2])
    assert engines.went_back == [engines.offered[2]]
    assert anew == VersionId(2, refused.number + 1)
    assert weights.read_manifest(world.store, anew).is_complete
    after = weights.read_manifest(world.store, engines.offered[5])
    assert after.base is not None
    assert after.base.version == anew
    assert refused not in weights.accepted_chain(world.store)
    # The same weights under another name: training goes on as if nothing had happened.
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []


async def test_a_first_version_that_is_refused_has_no_version_to_go_back_to(
    make_world: MakeWorld,
) -> None:
    world, engines = make_world(), scripted(0)

    def prepare(run: Run) -> None:
        run.publishing.engines = engines

    assert await world.train(prepare)
    assert read_epoch(world.store, 2).parent is not None  # the supervised phase published some
    assert world.audit().findings == []


async def test_versions_that_are_refused_again_and_again_end_the_process(
    make_world: MakeWorld,
) -> None:
    world = make_world()

    def prepare(run: Run) -> None:
        run.publishing.engines = scripted(*range(100))

    with pytest.raises(ExceptionGroup) as caught:
        await world.train(prepare)
    assert isinstance(root_cause(caught.value), VersionRefusedError)
    assert len(weights.list_quarantined(world.store)) == 2


async def test_a_resume_after_a_rollback_goes_on_where_the_rollback_led(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world = make_world()

    def prepare(run: Run) -> None:
        run.publishing.engines = scripted(2)
        assert isinstance(run.learners, SimulatedLearners)
        run.learners.steps_until_crash = 8

    with pytest.raises(ExceptionGroup):
        await world.train(prepare)
    assert await world.train()
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []


async def test_a_controller_that_was_replaced_rolls_nothing_back(make_world: MakeWorld) -> None:
    world = make_world()
    await world.train()
    run = world.runs[0]
    claim_epoch(world.store, holder="successor", parent=None, reason="takeover")
    with pytest.raises(FencedError):
        await run.publishing.abandon_version(VersionId(*run.progress.cursor.policy), why="late")
    assert read_epoch(world.store, 2).holder == "successor"
    assert world.store.head("weights/epochs/000003.json") is None


async def test_what_is_written_while_an_epoch_opens_comes_after_its_first_record(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    run, _, _ = world.start()
    log = run.book.journal
    task = asyncio.create_task(log.run(), name="journal")
    noted: list[int] = []

    async def claim() -> int:
        for _ in range(3):
            body = journal_pb2.JournalStep(phase="sft")
            noted.append(run.book.write(journal_pb2.JournalRecord(step=body)))
            await asyncio.sleep(0)
        return claim_epoch(world.store, holder="t", parent=None, reason="rollback", after=1)

    before = log.last_sequence
    assert await log.open_epoch(claim) == 2
    await asyncio.wait_for(log.wait_durable(), 30)
    task.cancel()
    assert noted == [before + 2, before + 3, before + 4]
    assert world.audit().findings == []
    later, _, _ = world.start()
    assert later.book.journal.last_sequence == noted[-1] + 1


FIRST = VersionId(1, 0)


@dataclass
class Marking(SimulatedRollouts):
    """Samples on an engine process that is found damaged after some orders."""

    store: Any = None
    after: int = 0
    since: VersionId = FIRST

    @override
    async def run(self, order: Any) -> Any:
        result = await SimulatedRollouts.run(self, order)
        trained = [each for each in self.orders if each.group_id.startswith("rl-")]
        if len(trained) >= self.after and not weights.list_suspects(self.store):
            mark_suspect(self.store, self.replica, since=self.since, message="bit flip")
            self.replica = "engine-1"  # the process ends, and another takes its place
        return result


def damage(world: Any, *, after: int, since: VersionId) -> Callable[[Run], None]:
    def prepare(run: Run) -> None:
        old = run.dispatcher.workers
        assert isinstance(old, SimulatedRollouts)
        run.dispatcher.workers = Marking(old.serving, store=world.store, after=after, since=since)

    return prepare


def on_another_engine(run: Run) -> None:
    assert isinstance(run.dispatcher.workers, SimulatedRollouts)
    run.dispatcher.workers.replica = "engine-2"


def trained_replicas(world: Any) -> Iterator[tuple[str, int]]:
    """Of every trained token's span: the process and the version, from the journal."""
    groups: dict[str, dict[str, journal_pb2.JournalRollout]] = {}
    for record in write_ahead_log.recover_records(
        world.store, run_uid="run", before_epoch=99, since=0
    ).records:
        match record.WhichOneof("body"):
            case "rollout":
                rollout = record.rollout.rollout
                groups.setdefault(rollout.group_id, {})[rollout.rollout_id] = record.rollout
            case "drop":
                groups[record.drop.group_id].pop(record.drop.rollout_id, None)
            case "batch":
                for name in record.batch.group_ids:
                    for each in groups.pop(name).values():
                        yield from ((s.replica, s.sampled.number) for s in version_uses(each))
            case _:
                pass


@pytest.mark.parametrize("staleness", [0, 2])
async def test_no_token_of_a_damaged_engine_is_trained_after_it_is_known(
    make_world: MakeWorld, staleness: int
) -> None:
    world = make_world(staleness=staleness)
    assert await world.train(damage(world, after=1, since=VersionId(1, 0)))
    assert dropped(world)["suspect_policy"] >= 3
    assert {replica for replica, _ in trained_replicas(world)} == {"engine-1"}
    found = world.audit(max_staleness=staleness)
    assert found.findings == []
    assert found.accepted == found.trained + found.dropped.total() + found.queued
    assert found.dropped["suspect_policy"] == dropped(world)["suspect_policy"]
    redrawn = [r["message"] for r in world.rows("event") if r["reason"] == "RolloutsRedrawn"]
    assert redrawn, "groups that were under way may end after the first look"
    assert all("suspect_policy" in message for message in redrawn)


async def test_what_a_damaged_engine_sampled_before_its_last_good_audit_is_trained(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    assert await world.train(damage(world, after=1, since=VersionId(1, 999)))
    assert "suspect_policy" not in dropped(world)


@dataclass
class Spoiling(SimulatedRollouts):
    """Samples evaluations on engine processes of which the first so many are found damaged."""

    store: Any = None
    damaged: int = 0

    @override
    async def run(self, order: Any) -> Any:
        result = await SimulatedRollouts.run(self, order)
        mine = f"engine-{self.damaged}"
        if order.group_id.startswith("eval-") and self.damaged and self.replica == mine:
            mark_suspect(self.store, mine, since=FIRST, message="bit flip")
            self.damaged -= 1
            self.replica = f"engine-{self.damaged}"
        return result


async def evaluated(world: Any, *, damaged: int) -> list[Any]:
    """The orders of a run whose first evaluations meet so many damaged engines."""
    found: list[Spoiling] = []

    def prepare(run: Run) -> None:
        assert isinstance(run.dispatcher.workers, SimulatedRollouts)
        spoiling = Spoiling(run.dispatcher.workers.serving, store=world.store, damaged=damaged)
        spoiling.replica = f"engine-{damaged}"
        run.dispatcher.workers = spoiling
        found.append(spoiling)

    assert await world.train(prepare)
    return [order for order in found[0].orders if order.group_id.startswith("eval-")]


async def test_an_evaluation_on_a_damaged_engine_is_done_again(make_world: MakeWorld) -> None:
    world = make_world()
    orders = await evaluated(world, damaged=1)
    again = [order for order in orders if order.draws]
    assert again
    assert {order.draws for order in again} == {(1,)}
    first = {order.group_id: order for order in orders if not order.draws}
    for order in again:
        before = first[order.group_id]
        assert (order.task_id, order.seed) == (before.task_id, before.seed)
    counts = [row["count"] for row in world.rows("eval")]
    assert counts == [4, 2, 4]
    told = [row["message"] for row in world.rows("event") if row["reason"] == "RolloutsRedrawn"]
    assert [message for message in told if "suspect_policy" in message and "held-out" in message]


async def test_what_damaged_engines_say_of_the_policy_is_lost_and_never_a_score(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def every_one(_: QuarantineMarks, record: journal_pb2.JournalRollout) -> RedrawReason | None:
        return "suspect_policy" if record.rollout.group_id.startswith("eval-held-out-4-") else None

    monkeypatch.setattr(QuarantineMarks, "drop_reason", every_one)
    world = make_world()
    orders = await evaluated(world, damaged=0)
    redrawn = [order for order in orders if order.group_id == "eval-held-out-4-sampled-0"]
    assert [order.draws for order in redrawn] == [(), (1,), (2,), (3,)]
    assert [row["count"] for row in world.rows("eval")] == [2, 4]
    told = {row["reason"]: row["message"] for row in world.rows("event")}
    assert told["EvaluationIncomplete"] == "held-out: 4 rollouts were lost"


class KilledError(RuntimeError):
    """The process is gone."""


@dataclass(slots=True)
class Dies(MemoryStore):
    """Loses its writer at one segment of the journal, before or after that took effect."""

    left: int = 1 << 30
    is_written: bool = False

    @override
    def create(self, key: str, data: bytes) -> None:
        if key.startswith("journal/"):
            self.left -= 1
        if self.left > 0 or (self.left == 0 and self.is_written):
            MemoryStore.create(self, key, data)
        if self.left <= 0:
            raise KilledError(key)

    @override
    def put(self, key: str, data: Any) -> None:
        if self.left <= 0:
            raise KilledError(key)
        MemoryStore.put(self, key, data)


@pytest.mark.parametrize("kill", [1, 3, 4, 5, 6, 7, 8, 10, 12])
async def test_the_account_adds_up_after_a_kill_at_any_record_of_a_run_that_redraws(
    make_world: MakeWorld, kill: int
) -> None:
    after = 1 + kill % 3
    store = Dies(left=kill, is_written=bool(kill % 2))
    world = make_world(store, staleness=2)
    try:
        done = await world.train(damage(world, after=after, since=VersionId(1, 0)))
    except (ExceptionGroup, KilledError):
        store.left = 1 << 30
        done = await world.train(on_another_engine)
    assert done
    found = world.audit(max_staleness=2)
    ledger = world.runs[-1].book.ledger
    assert found.findings == []
    assert found.accepted == found.trained + found.dropped.total() + found.queued
    assert (found.accepted, found.trained, found.queued) == (
        ledger.accepted,
        ledger.trained,
        ledger.queued,
    )
    assert found.dropped == ledger.dropped


@dataclass
class Mistaken(SimulatedRollouts):
    """Says of one rollout that newer weights were read than sampled."""

    @override
    async def run(self, order: Any) -> Any:
        result = await SimulatedRollouts.run(self, order)
        if order.group_id.startswith("rl-") and not self.is_done:
            self.is_done = True
            wrong = journal_pb2.JournalRollout.FromString(result.records[0])
            span = wrong.rollout.links[0].spans[0]
            span.sampled.epoch, span.sampled.number = 1, span.context.number - 1
            result = result._replace(records=(wrong.SerializeToString(), *result.records[1:]))
        return result

    is_done: bool = False


async def test_a_rollout_whose_spans_cannot_be_true_is_left_out_and_counted(
    make_world: MakeWorld,
) -> None:
    world = make_world()

    def prepare(run: Run) -> None:
        assert isinstance(run.dispatcher.workers, SimulatedRollouts)
        run.dispatcher.workers = Mistaken(run.dispatcher.workers.serving)

    assert await world.train(prepare)
    assert dropped(world) == {"invalid_span": 1}
    assert world.runs[0].reporter.status.rollouts.masked == 1
    assert world.audit(max_staleness=0).findings == []
