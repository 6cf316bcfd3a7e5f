"""Every process that the controller starts is told the run's settings of weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.common.role_inputs import ResolvedRun
from etude.common.run_folder.record import open_record
from etude.trainer.controller import lifecycle
from etude.trainer.controller.checkpoints.recovery import open_run
from etude.trainer.controller.inputs import Inputs, TaskSets
from etude.trainer.controller.run import Run, RunServices
from etude.trainer.settings import Settings

MakeWorld = Callable[..., Any]

WEIGHTS = {
    "dtype": "Float32",
    "keyframeEverySteps": 91,
    "timeoutSeconds": 77,
    "advanced": {
        "codec": "L2r",
        "tileGrid": 4,
        "stepsPerVersion": 3,
        "allowNonFinite": True,
        "chainRatio": "0.25",
        "skips": [2, 16],
        "commit": "Together",
        "commitTimeoutSeconds": 11,
        "retainKeyframes": 5,
        "retainVersions": 19,
    },
}
"""Of each setting another value than its default."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_env(
        {
            "ETUDE_RUN_FILE": "/run.json",
            "ETUDE_SCRATCH": str(tmp_path),
            "ETUDE_INFERENCE_TARGETS": "127.0.0.1:1",
            "ETUDE_BROKERS": json.dumps({"repos": "127.0.0.1:2"}),
        }
    )


@pytest.fixture
def world(make_world: MakeWorld) -> Any:
    return make_world(weights=WEIGHTS)


@pytest.fixture
def resolved(world: Any) -> ResolvedRun:
    return ResolvedRun.model_validate({"name": "demo", "uid": "run", "spec": world.spec})


@pytest.fixture
def inputs(world: Any, tmp_path: Path) -> Inputs:
    return Inputs(world.store, tmp_path, world.chat, TaskSets(orders={}, evaluations={}))


def test_learners_and_the_compactor_have_the_settings_of_the_run(
    settings: Settings, resolved: ResolvedRun, inputs: Inputs
) -> None:
    (learner,) = lifecycle.learner_configs(settings.pod, resolved, inputs)
    assert learner.weights == resolved.spec.weights
    compactor = lifecycle._compactor_config(settings, resolved, 7)
    assert (compactor.weights, compactor.epoch) == (resolved.spec.weights, 7)


def test_rollouts_wait_for_engines_as_long_as_an_engine_may_take(
    settings: Settings, resolved: ResolvedRun, inputs: Inputs
) -> None:
    assert lifecycle._worker_config(settings, resolved, inputs).outage_s == 77


async def test_the_controller_waits_for_engines_and_keyframes_as_the_run_says(
    settings: Settings, resolved: ResolvedRun, inputs: Inputs, world: Any
) -> None:
    before, _, _ = world.start()
    phases = resolved.spec.phases
    opened = open_run(inputs.store, run_uid="run", phases=phases, added_tokens=(), holder="test")
    services = RunServices(
        learners=before.learners,
        workers=before.dispatcher.workers,
        engines=lifecycle._engines(settings, resolved.spec),
        compactor=before.publishing.compaction.client,
        record=open_record(inputs.store),
        plans=lifecycle._plan_reporter(settings, resolved),
    )
    run = Run.assemble(
        resolved, opened, services, store=inputs.store, holder="test", chat=inputs.chat
    )
    assert (run.publishing.engines.timeout_s, run.publishing.engines.together_s) == (77, 11)
    assert run.publishing.compaction.versions == 91 // 3
    await run.publishing.engines.close()


@pytest.mark.parametrize(
    ("gpus", "given", "codec"), [(1, "Auto", "Auto"), (2, "Auto", "L1"), (2, "L2r", "L2r")]
)
def test_codecs_of_whole_tiles_are_not_chosen_for_engines_of_several_ranks(
    settings: Settings, make_world: MakeWorld, inputs: Inputs, gpus: int, given: str, codec: str
) -> None:
    spec = make_world(weights={"dtype": "Float32", "advanced": {"codec": given}}).spec
    spec["roles"]["inference"] = {"gpusPerReplica": gpus}
    resolved = ResolvedRun.model_validate({"name": "demo", "uid": "run", "spec": spec})
    (config,) = lifecycle.learner_configs(settings.pod, resolved, inputs)
    assert config.weights.advanced.codec == codec
