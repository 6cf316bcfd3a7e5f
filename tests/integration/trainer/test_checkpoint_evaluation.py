"""The program of an EvalRun's Job: pinned engines, figures of suites, comparison, repetition."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.trainer.scripted_endpoint import serve_endpoint
from tests.support.weights.publishing import TrainedPolicy

from etude.common.api.checkpoint.spec import CheckpointSource
from etude.common.api.evaluation.spec import EvalRunSpec
from etude.common.api.evaluation.status import EvaluationResult, MetricResult, SuiteResult
from etude.common.api.route.release import MAX_GATE_MARGINS, MAX_GATE_SUITES
from etude.common.api.run.spec import RLRunSpec
from etude.common.checkpoints import manifest as checkpoints
from etude.common.checkpoints.manifest import CheckpointManifest
from etude.common.errors import CorruptError, UnavailableError, UserError
from etude.common.role_inputs import ResolvedEvaluation, ResolvedRun
from etude.common.stores import open_run_store
from etude.common.weights import VersionId, WeightManifest, claim_epoch
from etude.common.weights.tensors.schema import Schema, TensorSpec, split_of
from etude.trainer.commands.evaluate_checkpoint import Settings, run_evaluation
from etude.trainer.commands.evaluation_result import MAX_MESSAGE, result_message
from etude.trainer.rollouts import pinned_engine
from etude.trainer.rollouts.pinned_engine import PinnedEngine

SCHEMA = Schema(
    grid=1, tensors=(TensorSpec(name="w", dtype="F32", shape=(64,), split=split_of("w")),)
)
NUM_TASKS = 4


class World(NamedTuple):
    """A run's store with versions and a checkpoint, a suite, and the partners."""

    partners: Any
    settings: Settings
    versions: dict[int, WeightManifest]
    order: Callable[..., ResolvedEvaluation]


@pytest.fixture
def world(partners: Any, model_folder: Path, tmp_path: Path) -> World:
    uri = f"file://{tmp_path}/run"
    _write_suite(tmp_path / "suite")
    run = _run_spec(uri, model_folder)
    store = open_run_store(uri, run.storage)
    claim_epoch(store, holder="trainer-0", parent=None, reason="start")
    policy = TrainedPolicy(SCHEMA)
    versions = {}
    for number in range(4):
        policy.step()
        versions[number] = policy.publish(store, number, complete=not number)
    partners.weights.manifests = {n: bytes.fromhex(m.sha256) for n, m in versions.items()}
    source = _write_checkpoint(store, version=2)

    def order(name: str = "candidate", **spec: Any) -> ResolvedEvaluation:
        body = {
            "checkpointRef": {"name": "run-s2"},
            "samples": 2,
            "suites": [
                {"name": "suite", "uri": f"file://{tmp_path}/suite", "environment": "repos"}
            ],
            "environments": [
                {"name": "repos", "poolRef": {"name": "shared"}, "template": "python"}
            ],
            "rollout": {"toolset": "Compact", "maxTokens": 600, "timeoutSeconds": 20, "retries": 0},
        }
        return ResolvedEvaluation(
            name=name,
            uid=f"uid-{name}",
            spec=EvalRunSpec.model_validate(body | spec),
            run=ResolvedRun(name="run", uid="uid-run", spec=run),
            checkpoint=None if "endpoint" in spec else source,
            results=f"{uri}/evaluations/{name}",
            baseline=f"{uri}/evaluations/served" if "comparison" in spec else None,
        )

    settings = Settings(
        evaluation_file=tmp_path / "evaluation.json",
        result_file=tmp_path / "result",
        engines=(partners.target,),
        rewards=partners.target,
        brokers={"repos": partners.target},
    )
    partners.rewards.values = (1.0, 0.0)
    return World(partners, settings, versions, order)


def _write_suite(suite: Path) -> None:
    for number in range(NUM_TASKS):
        folder = suite / f"fix-{number}"
        folder.mkdir(parents=True)
        (folder / "instruction.md").write_text(f"Fix number {number}.\n")
        (folder / "task.toml").write_text("")


def _run_spec(uri: str, model_folder: Path) -> RLRunSpec:
    return RLRunSpec.model_validate(
        {
            "model": {"uri": model_folder.as_uri()},
            "storage": {"uri": uri},
            "phases": [
                {
                    "name": "rl",
                    "type": "ReinforcementLearning",
                    "maxSteps": 40,
                    "optimizer": {"learningRate": "1e-3"},
                    "tasks": [{"name": "t", "uri": uri, "environment": "repos"}],
                    "algorithm": {"name": "DrGRPO"},
                }
            ],
            "roles": {
                "inference": {},
                "environments": [
                    {"name": "repos", "template": "python", "poolRef": {"name": "shared"}}
                ],
                "rewards": {"functions": [{"name": "tests", "function": "Verifier"}]},
            },
        }
    )


def _write_checkpoint(store: Any, *, version: int) -> CheckpointSource:
    prefix = checkpoints.CheckpointId(0, version).prefix
    store.put(f"{prefix}learner/weights.bin", b"moments")
    made = checkpoints.write_manifest(
        store,
        CheckpointManifest(
            run="uid-run",
            step=version,
            phase="rl",
            phase_step=version,
            epoch=1,
            policy_version=version,
            reason="Scheduled",
            objects=[checkpoints.describe_object(store, prefix, "learner/weights.bin")],
        ),
    )
    return CheckpointSource(uri=f"{store.url}/{prefix}", manifest_digest=made.digest)


async def test_the_engine_is_pinned_to_the_checkpoints_version_and_proves_it(world: World) -> None:
    result = await run_evaluation(world.order(), world.settings)
    assert result.policy == "1.2"
    assert result.manifest_digest == world.versions[2].sha256
    assert world.partners.weights.target == VersionId(1, 2).to_proto()
    (suite,) = result.suites
    assert (suite.tasks, suite.samples, suite.lost) == (NUM_TASKS, 2 * NUM_TASKS, 0)
    assert (suite.mean, suite.best_of, suite.best_of_samples) == ("0.5000", "1.0000", 2)
    assert suite.verdict == ""


async def test_an_engine_that_restarted_is_pinned_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_engine, "POLL_S", 0.01)
    weights = world.partners.weights
    engine = PinnedEngine(
        target=world.partners.target,
        version=VersionId(1, 2),
        digest=weights.manifests[2],
        poll_s=0.01,
    )
    async with engine.pin(), asyncio.timeout(20):
        weights.target = None  # another process, which follows the newest version
        weights.engine.version = VersionId(1, 3).to_proto()
        while weights.engine.version.number != 2:  # noqa: ASYNC110 - over the wire
            await asyncio.sleep(0.01)


async def test_an_engine_with_other_content_is_refused(world: World) -> None:
    world.partners.weights.manifests[2] = bytes(32)
    with pytest.raises(CorruptError, match=r"serves 1\.2 with manifest 000000000000"):
        await run_evaluation(world.order(), world.settings)


async def test_an_engine_whose_memory_was_found_damaged_gives_no_result(world: World) -> None:
    engine = PinnedEngine(
        target=world.partners.target,
        version=VersionId(1, 2),
        digest=world.partners.weights.manifests[2],
    )
    with pytest.raises(CorruptError, match="an audit found"):
        async with engine.pin():
            world.partners.weights.suspects = True


async def test_an_engine_that_never_serves_the_version_is_named(world: World) -> None:
    engine = PinnedEngine(
        target="127.0.0.1:1", version=VersionId(1, 2), digest=b"", poll_s=0.01, start_s=0.05
    )
    with pytest.raises(UnavailableError, match=r"does not serve version 1\.2"):
        async with engine.pin():
            pass


async def test_a_checkpoint_of_a_version_that_is_gone_is_refused(world: World) -> None:
    order = world.order()
    store = open_run_store(order.run.spec.storage.uri, order.run.spec.storage)
    store.delete([VersionId(1, 2).manifest_key])
    with pytest.raises(UserError, match="policy version 2, which the run has no more"):
        await run_evaluation(order, world.settings)


async def test_another_checkpoint_at_that_place_is_refused(world: World) -> None:
    order = world.order()
    assert order.checkpoint is not None
    other = order.checkpoint.model_copy(update={"manifest_digest": "0" * 64})
    with pytest.raises(CorruptError, match="has digest"):
        await run_evaluation(order.model_copy(update={"checkpoint": other}), world.settings)


async def test_a_checkpoint_is_compared_with_the_baseline_task_by_task(world: World) -> None:
    world.partners.rewards.values = (1.0, 1.0)
    await run_evaluation(world.order("served"), world.settings)
    world.partners.rewards.values = (0.0, 0.0)
    comparison = {"baselineRef": {"name": "served"}, "minTasks": NUM_TASKS}
    result = await run_evaluation(world.order(comparison=comparison), world.settings)
    (suite,) = result.suites
    assert (result.verdict, suite.verdict, suite.difference) == ("Refused", "Refused", "-1.0000")
    assert suite.sentence.startswith("refused: success worse by 100.0 points")
    (figures,) = suite.comparisons
    assert (figures.metric, figures.difference, figures.tasks) == ("Success", "-1", NUM_TASKS)
    assert (figures.scored, figures.baseline_scored) == (suite.samples, suite.samples)
    assert result.baseline_policy == result.policy == "1.2"


async def test_an_endpoint_is_compared_with_a_checkpoint_on_the_same_tasks(world: World) -> None:
    await run_evaluation(world.order("served"), world.settings)
    with serve_endpoint() as endpoint:
        order = world.order(
            checkpointRef=None,
            endpoint={"url": endpoint.url, "model": "others-7b"},
            runRef={"name": "run"},
            rollout={"toolset": "Compact", "toolFormat": "Native", "timeoutSeconds": 20},
            comparison={"baselineRef": {"name": "served"}, "minTasks": NUM_TASKS},
        )
        result = await run_evaluation(order, world.settings)
    (suite,) = result.suites
    assert (result.policy, result.manifest_digest, result.baseline_policy) == ("", "", "1.2")
    assert (suite.mean, suite.difference, suite.tasks) == ("0.5000", "0.0000", NUM_TASKS)


async def test_a_suite_that_the_baseline_lacks_decides_nothing(world: World) -> None:
    result = await run_evaluation(
        world.order(comparison={"baselineRef": {"name": "served"}}), world.settings
    )
    assert result.verdict == "NotEnoughData"
    assert result.suites[0].difference is None


async def test_lost_rollouts_are_repeated_before_the_suite_fails(world: World) -> None:
    world.partners.rewards.faults = 3
    result = await run_evaluation(world.order(), world.settings)
    assert result.suites[0].lost == 0
    world.partners.rewards.faults = 1_000
    with pytest.raises(UnavailableError, match="lost 8 of 8 rollouts"):
        await run_evaluation(world.order("other"), world.settings)


def test_a_long_result_is_handed_over_without_its_sentences() -> None:
    figures: dict[str, Any] = {
        "mean": "0.5000",
        "best_of": "0.7500",
        "reward": "-0.2500",
        "low": "-0.0100",
    }
    suites = tuple(
        SuiteResult(
            name=f"{'s' * 38}-{n}",
            tasks=1_000_000,
            samples=64_000_000,
            lost=999,
            best_of_samples=64,
            difference="-0.0100",
            verdict="NotEnoughData",
            sentence="ä" * 240,
            **figures,
        )
        for n in range(8)
    )
    result = EvaluationResult(policy="1.2", manifest_digest="a" * 64, suites=suites)
    text = result_message(result)
    assert len(text.encode()) <= MAX_MESSAGE
    handed = EvaluationResult.model_validate(json.loads(text))
    assert [each.mean for each in handed.suites] == ["0.5000"] * 8


def test_the_figures_of_the_largest_gate_are_handed_over() -> None:
    text: dict[str, Any] = {"difference": "-0.0001235", "low": "-0.0001235", "high": "-0.0001235"}
    names = ("baseline_expected", "baseline_scored", "expected", "scored", "tasks", "unpaired")
    counts: dict[str, Any] = dict.fromkeys(names, 10_000)
    found = tuple(
        MetricResult(metric=metric, **text, **counts)
        for metric in ("EditsWithoutEvidence", "SampledTokens", "Success")[:MAX_GATE_MARGINS]
    )
    figures: dict[str, Any] = {
        "mean": "0.5000",
        "best_of": "0.7500",
        "reward": "-0.2500",
        "low": "-0.0100",
    }
    suites = tuple(
        SuiteResult(
            name=f"{'s' * 60}-{n}",
            tasks=10_000,
            samples=10_000,
            verdict="Refused",
            sentence="x" * 240,
            comparisons=found,
            **figures,
        )
        for n in range(MAX_GATE_SUITES)
    )
    result = EvaluationResult(
        policy="1.2", manifest_digest="a" * 64, baseline_policy="1.1", suites=suites
    )
    handed = EvaluationResult.model_validate(json.loads(result_message(result)))
    assert [each.comparisons for each in handed.suites] == [found] * MAX_GATE_SUITES


async def _run_program(world: World, *, stop: Callable[[], bool] | None = None) -> tuple[int, str]:
    """Exit code and errors of the program; it gets SIGTERM once stop() is true."""
    target, settings = world.partners.target, world.settings
    given = {
        "ETUDE_EVALUATION_FILE": str(settings.evaluation_file),
        "ETUDE_RESULT_FILE": str(settings.result_file),
        "ETUDE_INFERENCE_TARGETS": target,
        "ETUDE_REWARDS_TARGET": target,
        "ETUDE_BROKERS": json.dumps({"repos": target}),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "etude.trainer.commands.evaluate_checkpoint"),
        env={**os.environ, **given},
        stderr=asyncio.subprocess.PIPE,
    )
    while stop is not None and not stop():  # noqa: ASYNC110 - counts of the partners
        await asyncio.sleep(0.02)
    if stop is not None:
        process.terminate()
    _, errors = await process.communicate()
    return process.returncode or 0, errors.decode()


@pytest.mark.timeout(120)
async def test_a_program_that_is_told_to_end_goes_on_later_and_hands_its_result_over(
    world: World,
) -> None:
    settings, engine, broker = world.settings, world.partners.engine, world.partners.broker
    settings.evaluation_file.write_text(json.dumps(world.order().to_json()))
    engine.holds_after = 10
    code, errors = await _run_program(world, stop=lambda: engine.running > 1)
    assert code == 75, errors
    assert not settings.result_file.exists()
    # A release that is cut off is sent again: ids are compared, not counted.
    granted = {lease.lease_id for leases in broker.granted.values() for lease in leases}
    assert granted
    assert set(broker.released) == granted
    engine.holds_after = None
    code, errors = await _run_program(world)
    assert code == 0, errors
    result = EvaluationResult.model_validate_json(settings.result_file.read_text())
    assert (result.policy, result.suites[0].mean) == ("1.2", "0.5000")


@pytest.mark.timeout(120)
async def test_a_program_with_a_wrong_order_says_so_once(world: World) -> None:
    world.settings.evaluation_file.write_text("{}")
    code, errors = await _run_program(world)
    assert code == 78
    assert "cannot be read as ResolvedEvaluation" in errors
    assert "Traceback" not in errors
