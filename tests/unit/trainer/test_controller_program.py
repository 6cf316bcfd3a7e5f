"""The whole program of a run over simulated learners and rollouts: stop it anywhere, resume it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from typing_extensions import override

from etude.agent.chat import LAYOUT_TOKENS, ChatFormat
from etude.common.blobs import MemoryStore
from etude.common.checkpoints import newest_verified, stored, verify
from etude.common.errors import FencedError, StoreError, UserError
from etude.common.files import ResolvedRun
from etude.common.record import StoreRecord, latest
from etude.common.weights import VersionId, newest
from etude.trainer.controller.audit import Audit, audit
from etude.trainer.controller.engines import Engines
from etude.trainer.controller.evaluation import Evaluator
from etude.trainer.controller.inputs import TaskSets
from etude.trainer.controller.orders import Orders
from etude.trainer.controller.program import train
from etude.trainer.controller.recording import Recording
from etude.trainer.controller.recovery import open_run
from etude.trainer.controller.reinforcement import InfraFailuresError, MismatchError
from etude.trainer.controller.reports import Reports
from etude.trainer.controller.run import Run, root_cause
from etude.trainer.controller.saving import Saver
from etude.trainer.controller.tasks import Task, TaskOrder
from etude.trainer.simulation import SimulatedLearners, SimulatedRollouts
from etude.trainer.work import Published
from etude.v1 import run_pb2

SFT_STEPS = 4
RL_STEPS = 6


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("model")
    alphabet = {byte: i for i, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in LAYOUT_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return ChatFormat.load(folder)


def spec(*, staleness: int = 0, every_steps: int = 2, **fields: object) -> dict[str, Any]:
    mode = "FullyAsync" if staleness else "Sync"
    optimizer = {"learningRate": "1e-3"}
    task_set = {"name": "train", "uri": "file:///tasks", "environment": "repos"}
    pool = {"templates": [{"name": "python", "trust": "Trusted"}]}
    return {
        "model": {"uri": "file:///model"},
        "storage": {"uri": "file:///run"},
        "weights": {"dtype": "Float32", "keepVersions": 2},
        "checkpointing": {"everySteps": every_steps, "keepLast": 2},
        "phases": [
            {
                "name": "sft",
                "type": "SupervisedFineTuning",
                "maxSteps": SFT_STEPS,
                "optimizer": optimizer,
                "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
            },
            {
                "name": "rl",
                "type": "ReinforcementLearning",
                "maxSteps": RL_STEPS,
                "seed": 5,
                "optimizer": optimizer,
                "tasks": [task_set],
                "algorithm": {"promptsPerStep": 2, "groupSize": 3},
                "asyncLimits": {"mode": mode, "maxStalenessVersions": staleness},
                "rollout": {"maxInfraFailurePercent": 40},
            },
        ],
        "evaluation": [
            {"name": "held-out", "tasks": task_set, "phase": "rl", "everySteps": 3, "limit": 2}
        ],
        "roles": {
            "inference": {},
            "environments": [{"name": "repos", "template": "python", "poolTemplate": pool}],
            "rewards": {"functions": [{"name": "success", "function": "Verifier"}]},
        },
        **fields,
    }


@dataclass
class World:
    """What outlives a controller: the store."""

    chat: ChatFormat
    spec: dict[str, Any]
    store: MemoryStore = field(default_factory=MemoryStore)
    fault_share: float = 0.0
    runs: list[Run] = field(default_factory=list)

    def start(self) -> tuple[Run, TaskSets, Any]:
        """A new controller takes over."""
        resolved = ResolvedRun.model_validate({"name": "demo", "uid": "run", "spec": self.spec})
        phases = resolved.spec.phases
        opened = open_run(self.store, run_uid="run", phases=phases, holder="test")
        learners = SimulatedLearners(self.store)
        holder: list[Run] = []
        rollouts = SimulatedRollouts(
            lambda: VersionId(*(holder[0].cursor.policy or (0, 0))), self.fault_share
        )
        run = Run(
            resolved=resolved,
            epoch=opened.epoch,
            store=self.store,
            book=opened.book,
            cursor=opened.cursor,
            figures=opened.figures,
            next_version=opened.next_version,
            learners=learners,
            rollouts=rollouts,
            engines=Engines((), timeout_s=1.0),
            saver=Saver(self.store, opened.book, learners),
            reports=Reports("run", opened.epoch),
            orders=Orders(resolved.spec.checkpointing, resolved.spec.evaluation, 1),
            recording=Recording(StoreRecord(self.store)),
            chat=self.chat,
        )
        holder.append(run)
        self.runs.append(run)
        tasks = tuple(
            Task(task_id=f"train/t{i}", uri=f"file:///tasks/t{i}", environment="repos")
            for i in range(30)
        )
        held_out = tuple(
            Task(task_id=f"held-out/t{i}", uri=f"file:///h/t{i}", environment="repos")
            for i in range(4)
        )
        sets = TaskSets(
            orders={p.name: TaskOrder(tasks=tasks, seed=p.seed) for p in phases if p.is_rl},
            evaluations={"held-out": held_out},
        )
        return run, sets, opened.checkpoint

    async def train(self, prepare: Callable[[Run], None] = lambda _run: None) -> bool:
        run, sets, checkpoint = self.start()
        prepare(run)
        async with asyncio.timeout(60):
            return await train(run, sets, checkpoint=checkpoint)

    @property
    def digest(self) -> str:
        learners = self.runs[-1].learners
        assert isinstance(learners, SimulatedLearners)
        return learners.weights

    def audit(self, **arguments: Any) -> Audit:
        return audit(self.store.objects, **arguments)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [dict(r) for r in latest(StoreRecord(self.store).rows()) if r["kind"] == kind]


async def crash(world: World, *, after: int) -> None:
    """One controller that dies after so many steps, as with kill -9."""

    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        run.learners.steps_until_crash = after

    with pytest.raises(ExceptionGroup) as caught:
        await world.train(prepare)
    assert isinstance(root_cause(caught.value), ConnectionError)


@pytest.fixture(scope="module")
def uninterrupted(chat: ChatFormat) -> str:
    world = World(chat, spec())
    assert asyncio.run(world.train())
    return world.digest


async def test_a_run_goes_through_its_phases_and_ends_with_a_final_checkpoint(
    chat: ChatFormat,
) -> None:
    world = World(chat, spec())
    assert await world.train()
    run = world.runs[0]
    assert run.cursor.global_step == SFT_STEPS + RL_STEPS
    manifests = sorted(k for k in world.store.objects if k.endswith("/manifest.json"))
    reasons = [json.loads(world.store.get(key))["reason"] for key in manifests]
    assert reasons == ["Scheduled", "PhaseEnd", "Scheduled", "Scheduled", "Final"]
    assert any("000000000010/model/config.json" in key for key in world.store.objects)
    found = world.audit(max_staleness=0)
    assert found.findings == []
    assert (found.accepted, found.trained) == (36, 36)
    assert newest(world.store) == VersionId(*(run.cursor.policy or (0, 0)))


async def test_rows_tell_the_whole_story(chat: ChatFormat) -> None:
    world = World(chat, spec())
    await world.train()
    steps = world.rows("step")
    assert [r["global_step"] for r in steps] == list(range(1, SFT_STEPS + RL_STEPS + 1))
    assert {"reward_mean", "staleness_max", "mismatch_mean", "tools"} <= steps[-1].keys()
    assert [r["step"] for r in world.rows("eval")] == [0, 3, 6]
    assert [r["count"] for r in world.rows("eval")] == [4, 2, 4]
    assert "greedy_success" in world.rows("eval")[0]
    assert "greedy_success" not in world.rows("eval")[1]
    written = list(StoreRecord(world.store).rollouts(SFT_STEPS + 1, "train"))
    assert len(written) == 6
    assert written[0]["turns"][-1]["role"] == "assistant"


@pytest.mark.parametrize("after", range(SFT_STEPS + RL_STEPS))
async def test_a_run_killed_after_any_step_resumes_to_the_same_weights(
    chat: ChatFormat, uninterrupted: str, after: int
) -> None:
    world = World(chat, spec())
    await crash(world, after=after)
    assert await world.train()
    assert world.digest == uninterrupted
    found = world.audit(max_staleness=0)
    assert found.findings == []
    assert found.accepted == found.trained + found.dropped.total() + found.queued


async def test_a_run_killed_again_and_again_resumes_to_the_same_weights(
    chat: ChatFormat, uninterrupted: str
) -> None:
    world = World(chat, spec())
    for after in (3, 2, 1, 0, 2, 1):
        await crash(world, after=after)
    assert await world.train()
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []


async def test_with_every_checkpoint_lost_the_journal_alone_gives_the_same_weights(
    chat: ChatFormat, uninterrupted: str
) -> None:
    world = World(chat, spec())
    await crash(world, after=SFT_STEPS + 4)
    for key in [k for k in world.store.objects if k.startswith("checkpoints/")]:
        del world.store.objects[key]
    assert await world.train()
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []


async def test_a_corrupt_newest_checkpoint_falls_back_to_the_one_before(
    chat: ChatFormat, uninterrupted: str
) -> None:
    world = World(chat, spec())
    await crash(world, after=SFT_STEPS + 5)
    damaged = max(k for k in world.store.objects if k.endswith("learner/state.json"))
    world.store.objects[damaged] = b"garbage"
    resolved = ResolvedRun.model_validate({"name": "d", "uid": "run", "spec": world.spec})
    opened = open_run(world.store, run_uid="run", phases=resolved.spec.phases, holder="t")
    assert len(opened.problems) == 1
    assert damaged.rsplit("/", 2)[0] in opened.problems[0]
    assert await world.train()
    assert world.digest == uninterrupted


async def test_falling_back_over_the_end_of_a_phase_keeps_the_batches_of_the_next(
    chat: ChatFormat,
) -> None:
    given = spec()
    second = {**given["phases"][1], "name": "more", "maxSteps": 4}
    given["phases"].append(second)
    whole = World(chat, given)
    assert await whole.train()
    world = World(chat, given)
    await crash(world, after=SFT_STEPS + RL_STEPS + 1)
    end = f"checkpoints/{SFT_STEPS + RL_STEPS:012d}/000001/learner/state.json"
    world.store.objects[end] = b"garbage"
    assert await world.train()
    assert world.digest == whole.digest
    assert world.audit(max_staleness=0).findings == []


@pytest.mark.parametrize("staleness", [1, 2, 4])
async def test_asynchronous_runs_hold_their_bound_over_crashes(
    chat: ChatFormat, staleness: int
) -> None:
    world = World(chat, spec(staleness=staleness))
    for after in (SFT_STEPS + 2, 2):
        await crash(world, after=after)
    assert await world.train()
    found = world.audit(max_staleness=staleness)
    assert found.findings == []
    assert found.trained == 36
    assert max(r["staleness_max"] for r in world.rows("step") if "staleness_max" in r) <= staleness


async def test_lost_rollouts_are_masked_and_accounted_for(chat: ChatFormat) -> None:
    world = World(chat, spec(), fault_share=0.1)
    await crash(world, after=SFT_STEPS + 3)
    assert await world.train()
    found = world.audit(max_staleness=0)
    assert found.findings == []
    assert found.dropped["platform"] > 0
    assert found.trained + found.dropped.total() == found.accepted == 36
    assert sum(r.get("masked", 0) for r in world.rows("step")) == found.dropped["platform"]


async def test_too_many_lost_rollouts_stop_the_run_with_the_reason(chat: ChatFormat) -> None:
    world = World(chat, spec(), fault_share=0.9)
    with pytest.raises(ExceptionGroup) as caught:
        await world.train()
    error = root_cause(caught.value)
    assert isinstance(error, InfraFailuresError)
    assert "maxInfraFailurePercent 40" in str(error)
    assert "simulated" in str(error)


async def test_engine_and_learner_that_disagree_stop_the_run(chat: ChatFormat) -> None:
    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        run.learners.mismatch = 2e-3

    world = World(chat, spec())
    with pytest.raises(ExceptionGroup) as caught:
        await world.train(prepare)
    assert isinstance(root_cause(caught.value), MismatchError)
    # The update that was made from wrong samples is not published.
    manifests = [k for k in world.store.objects if k.startswith("weights/manifests/")]
    assert len(manifests) == 2


async def test_suspend_saves_and_resume_goes_on_to_the_same_weights(
    chat: ChatFormat, uninterrupted: str
) -> None:
    world = World(chat, spec(every_steps=100))

    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        learners = run.learners
        order = run_pb2.SuspendRun(checkpoint=True)
        request = run_pb2.CommandRequest(command_id="1", suspend=order)

        def suspend() -> None:
            if len(learners.trained) == SFT_STEPS + 2:
                run.orders.take(request)
                run.orders.take(request)

        learners.after_step = suspend

    assert not await world.train(prepare)
    steps = [int(k.split("/")[1]) for k in world.store.objects if k.endswith("/manifest.json")]
    assert max(steps) == world.runs[0].cursor.global_step
    assert await world.train()
    assert world.runs[1].cursor.global_step == SFT_STEPS + RL_STEPS
    assert world.digest == uninterrupted


async def test_a_newer_controller_stops_the_older_one(chat: ChatFormat, uninterrupted: str) -> None:
    world = World(chat, spec())
    older, sets, checkpoint = world.start()
    newer, _, _ = world.start()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(train(older, sets, checkpoint=checkpoint), 30)
    assert isinstance(root_cause(caught.value), FencedError)
    await asyncio.wait_for(train(newer, sets, checkpoint=None), 30)
    assert world.digest == uninterrupted
    assert world.audit().findings == []


async def test_another_run_is_refused_before_it_fences_the_one_that_lives(
    chat: ChatFormat,
) -> None:
    world = World(chat, spec())
    run, sets, checkpoint = world.start()
    phases = run.resolved.spec.phases
    with pytest.raises(UserError, match=r"storage\.uri.*holds run run"):
        open_run(world.store, run_uid="other", phases=phases, holder="test")
    assert await train(run, sets, checkpoint=checkpoint)


async def test_a_stalled_controller_leaves_its_successors_checkpoint_alone(
    chat: ChatFormat,
) -> None:
    world = World(chat, spec())
    stalled, _, _ = world.start()
    assert await world.train()
    stalled.cursor.global_step = SFT_STEPS
    before = dict(world.store.objects)
    with pytest.raises(FencedError):
        await stalled.save("PhaseEnd")
    assert world.store.objects == before


async def test_a_controller_that_stalls_while_it_saves_touches_only_its_own_folder(
    chat: ChatFormat,
) -> None:
    world = World(chat, spec())
    stalled, _, _ = world.start()
    await stalled.learners.save("checkpoints/000000000004/000001/")
    assert await world.train()
    await stalled.learners.save("checkpoints/000000000004/000001/")
    problems: list[str] = []
    for found in stored(world.store, run="run"):
        verify(world.store, found)
    assert newest_verified(world.store, run="run", problems=problems) is not None
    assert problems == []


@dataclass(slots=True)
class AwayLearners(SimulatedLearners):
    """Whose store is away for the first attempts to publish."""

    refusals: int = 2

    @override
    async def publish(self, version: VersionId, step: int) -> Published:
        if self.refusals:
            self.refusals -= 1
            raise StoreError("the store did not answer")
        return await SimulatedLearners.publish(self, version, step)


async def test_publishing_waits_for_a_store_that_is_away(
    chat: ChatFormat, uninterrupted: str
) -> None:
    world = World(chat, spec())

    def prepare(run: Run) -> None:
        run.learners = run.saver.learners = AwayLearners(world.store)

    assert await world.train(prepare)
    assert world.digest == uninterrupted


class NothingIsDeleted(MemoryStore):
    """Refuses deletions."""

    @override
    def delete(self, keys: Sequence[str]) -> None:
        raise StoreError("permission denied")


async def test_old_versions_that_cannot_be_pruned_fail_nothing(chat: ChatFormat) -> None:
    world = World(chat, spec(), store=NothingIsDeleted())
    assert await world.train()


async def test_faults_of_a_step_leave_out_those_before_it(chat: ChatFormat) -> None:
    world = World(chat, spec())

    def prepare(run: Run) -> None:
        run.figures.retried = 7
        run.book.ledger.dropped["stale"] = 3

    assert await world.train(prepare)
    rows = [row for row in world.rows("step") if "retried" in row]
    assert {(row["retried"], row["dropped"]) for row in rows} == {(0, 0)}


async def test_a_rollout_of_an_evaluation_is_a_movement_that_others_see(chat: ChatFormat) -> None:
    world = World(chat, spec())
    run, sets, _ = world.start()
    rl = run.resolved.spec.phases[1]
    run.enter(rl)
    run.moved_s = 0.0
    assert await Evaluator(run=run, phase=rl, tasks=dict(sets.evaluations)).evaluate()
    assert run.moved_s > 0.0
    run.report()
    assert run.reports.status.rollouts.completed == 8


async def test_configure_changes_the_cadence_and_echoes_the_generation(chat: ChatFormat) -> None:
    world = World(chat, spec(every_steps=100))

    def prepare(run: Run) -> None:
        changed = json.dumps(spec(every_steps=1))
        order = run_pb2.ConfigureRun(spec_json=changed, generation=7)
        run.orders.take(run_pb2.CommandRequest(command_id="c", configure=order))

    await world.train(prepare)
    assert world.runs[0].reports.status.observed_generation == 7
    checkpoints = [
        r for r in world.runs[0].reports._happenings if r.WhichOneof("body") == "checkpoint"
    ]
    assert len(checkpoints) == SFT_STEPS + RL_STEPS


async def test_a_checkpoint_on_command_is_written_at_the_next_step(chat: ChatFormat) -> None:
    world = World(chat, spec(every_steps=100))

    def prepare(run: Run) -> None:
        order = run_pb2.CommandRequest(command_id="1", checkpoint=run_pb2.CheckpointNow())
        run.orders.take(order)

    await world.train(prepare)
    happenings = world.runs[0].reports._happenings
    steps = [r.checkpoint.step for r in happenings if r.WhichOneof("body") == "checkpoint"]
    assert steps == [1, SFT_STEPS, SFT_STEPS + RL_STEPS]


async def test_old_versions_are_pruned_and_those_of_checkpoints_stay(chat: ChatFormat) -> None:
    world = World(chat, spec())
    await world.train()
    manifests = [k for k in world.store.objects if k.startswith("weights/manifests/")]
    checkpoints = [k for k in world.store.objects if k.endswith("/manifest.json")]
    named = {json.loads(world.store.get(k))["policy_version"] for k in checkpoints}
    numbers = {int(k.rsplit("/", 1)[1].removesuffix(".json")) for k in manifests}
    assert named <= numbers
    assert len(numbers) < world.runs[0].next_version


def test_the_controller_never_loads_torch() -> None:
    script = (
        "import sys, etude.trainer.controller.host\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
