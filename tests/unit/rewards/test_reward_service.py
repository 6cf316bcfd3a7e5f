"""The reward service on a real port, and its process's settings."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from etude.common.api.run.rewards import VerifierParameters
from etude.common.api.run.roles import RewardFunction
from etude.common.api.storage import Storage
from etude.common.rpc import channels
from etude.common.rpc import server as rpc_server
from etude.rewards.functions.verifier import Verifier
from etude.rewards.grading import GradeAnswer, LostGrade, MemorySandboxes
from etude.rewards.rubric import Rubric
from etude.rewards.scoring import Scorer
from etude.rewards.service import RewardService
from etude.rewards.settings import Settings
from etude.v1 import environments_pb2, rewards_pb2, rewards_pb2_grpc, rollout_pb2

Make = Callable[..., rollout_pb2.Rollout]
if TYPE_CHECKING:  # the stubs know an async class that the generated module lacks
    Stub = rewards_pb2_grpc.RewardServiceAsyncStub


def _answer(diff: environments_pb2.WorkspaceDiff) -> GradeAnswer:
    name = diff.written[0].content.decode() if diff.written else ""
    if name == "lost":
        return LostGrade("gone")
    return environments_pb2.GradeResponse(reward_file=b"1" if name == "right" else b"0")


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator["Stub"]:
    functions = [
        RewardFunction.model_validate({"name": "tests", "function": "Verifier"}),
        RewardFunction.model_validate({"name": "b", "function": "BrokenCalls", "weight": "0.2"}),
    ]
    verifier = Verifier(VerifierParameters(), MemorySandboxes(_answer))
    storage = Storage(uri=tmp_path.as_uri())
    scorer = Scorer(Rubric.from_functions(functions), verifier, storage, tmp_path / "scratch")
    server = rpc_server.Server(["etude.v1.RewardService"])
    service = RewardService(scorer, {"repos"})
    rewards_pb2_grpc.add_RewardServiceServicer_to_server(service, server.grpc_server)
    await server.start()
    async with channels.dial(f"127.0.0.1:{server.port}") as channel:
        yield rewards_pb2_grpc.RewardServiceStub(channel)
    await server.stop(0)


async def test_a_group_comes_back_in_order_with_parts_and_faults(
    stub: "Stub", task_folder: Path, rollout: Make
) -> None:
    broken = rollout_pb2.Costs(malformed_calls=1)
    request = rewards_pb2.ScoreRequest(
        group_id="g",
        task_uri=task_folder.as_uri(),
        pool="repos",
        rollouts=[rollout("right", costs=broken), rollout("lost"), rollout("wrong")],
    )
    answer = await stub.Score(request, timeout=10)
    assert [r.rollout_id for r in answer.records] == [r.rollout_id for r in request.rollouts]
    assert answer.records[0].reward == pytest.approx(0.8)
    assert answer.records[0].success == 1
    assert [(p.name, p.value, p.weight) for p in answer.records[0].parts] == [
        ("tests", 1.0, 1.0),
        ("b", -1.0, 0.2),
    ]
    assert answer.records[1].WhichOneof("result") == "fault"
    assert answer.records[1].fault.reason == "EnvironmentLost"
    assert answer.records[2].WhichOneof("result") == "reward"
    assert answer.records[2].reward == 0
    described = await stub.Describe(rewards_pb2.DescribeRequest(), timeout=10)
    assert described.rubric_digest == answer.rubric_digest
    assert [f.function for f in described.functions] == ["Verifier", "BrokenCalls"]


async def test_a_task_that_cannot_be_read_masks_its_group(
    stub: "Stub", task_folder: Path, rollout: Make
) -> None:
    (task_folder / "tests" / "test.sh").unlink()
    request = rewards_pb2.ScoreRequest(
        task_uri=task_folder.as_uri(), pool="repos", rollouts=[rollout("right")]
    )
    answer = await stub.Score(request, timeout=10)
    assert answer.records[0].fault.reason == "InvalidTask"
    assert "tests/test.sh" in answer.records[0].fault.message


@pytest.mark.parametrize(
    ("field", "change"),
    [("pool", {"pool": "other"}), ("task_uri", {"task_uri": ""}), ("rollouts", {"rollouts": []})],
)
async def test_a_bad_request_is_refused_by_its_field(
    stub: "Stub",
    task_folder: Path,
    field: str,
    change: dict[str, object],
) -> None:
    good = {"task_uri": task_folder.as_uri(), "pool": "repos", "rollouts": [rollout_pb2.Rollout()]}
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Score(rewards_pb2.ScoreRequest(**(good | change)), timeout=10)  # type: ignore[arg-type]
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(refusal.value)  # type: ignore[arg-type] # typed for the sync call
    violations = error_details_pb2.BadRequest()
    assert any(d.Is(violations.DESCRIPTOR) and d.Unpack(violations) for d in status.details)
    assert violations.field_violations[0].field == field


ENV = {"ETUDE_RUN_FILE": "/run.json", "ETUDE_BROKERS": "{}", "ETUDE_SCRATCH": "/scratch"}


@pytest.mark.parametrize("name", sorted(ENV))
def test_a_missing_setting_is_named(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        Settings.from_env({key: value for key, value in ENV.items() if key != name})


@pytest.mark.parametrize(
    ("name", "text"), [("ETUDE_PORT", "many"), ("ETUDE_BROKERS", "["), ("ETUDE_BROKERS", "[1]")]
)
def test_a_wrong_setting_is_named(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        Settings.from_env(ENV | {name: text})


def test_a_run_without_a_valid_spec_ends_the_process_as_a_configuration_error(
    tmp_path: Path,
) -> None:
    run_file = tmp_path / "run.json"
    run_file.write_text(json.dumps({"name": "demo", "uid": "u", "spec": {}}))
    done = subprocess.run(
        [sys.executable, "-m", "etude.rewards.main"],
        env=ENV | {"ETUDE_RUN_FILE": str(run_file), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 78
    assert str(run_file) in done.stderr
