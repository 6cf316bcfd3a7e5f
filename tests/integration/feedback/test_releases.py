"""A route's releases with a real service: requests over gRPC, users' events over HTTP."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from tests.support.feedback.experiment_users import send_work
from tests.support.feedback.process import FeedbackProcess
from tests.support.free_ports import reserve_port

from etude.cli.main import app
from etude.cli.output import exit_with_problem
from etude.common import api_keys
from etude.common.blobs import Store, open_store
from etude.common.experiments.assignment import Arm
from etude.common.release.channels import CANARY, STABLE, ChannelRecord, newest_record
from etude.common.rpc import channels
from etude.common.weights import VersionId
from etude.v1 import release_pb2, release_pb2_grpc, weights_pb2

RULES = {
    "intervalSeconds": 1,
    "canary": {
        "steps": [2_500, 5_000],
        "stepSeconds": 0,
        "usersPerArm": 30,
        "minUsers": 8,
        "primary": {"name": "edit persistence", "signal": "edit_persistence", "relevant": 0.2},
        "guardrails": [
            {
                "name": "complaints",
                "signal": "dissatisfied_followup",
                "relevant": 0.2,
                "isHigherBetter": False,
            }
        ],
        "signals": [],
    },
}


@dataclass
class Route:
    """A service, its store, and its operator's key."""

    service: FeedbackProcess
    store: Store
    key: str
    port: int

    async def ask(
        self, method: str, request_id: str, *, key: str | None = None, **fields: object
    ) -> release_pb2.ReleaseDecision:
        """Send one request; returns the decision."""
        caller = release_pb2.ReleaseCaller(request_id=request_id, reason="test")
        request = getattr(release_pb2, f"{method}Request")(caller=caller, **fields)
        metadata = (("authorization", f"Bearer {self.key if key is None else key}"),)
        async with channels.dial(f"127.0.0.1:{self.port}") as channel:
            stub = release_pb2_grpc.ReleaseServiceStub(channel)
            answer = await getattr(stub, method)(request, metadata=metadata, timeout=30)
        decision: release_pb2.ReleaseDecision = answer.decision
        return decision

    async def propose(self, number: int, against: int) -> release_pb2.ReleaseDecision:
        success = release_pb2.MetricComparison(
            metric="success", num_tasks=400, difference=0.01, low=0.0, high=0.02
        )
        return await self.ask(
            "Propose",
            f"propose-{number}",
            candidate=served(number),
            compared_with=served(against),
            comparisons=[success],
        )

    async def wait_for(self, channel: str, number: int) -> ChannelRecord:
        """Wait until a channel has a record."""
        async with asyncio.timeout(60):
            while True:
                record = newest_record(self.store, channel)
                if record is not None and record.number >= number:
                    return record
                await asyncio.sleep(0.1)


def served(number: int) -> release_pb2.ServedPolicyVersion:
    version = VersionId(1, number).to_proto()
    assert isinstance(version, weights_pb2.PolicyVersion)
    return release_pb2.ServedPolicyVersion(run_uid="run-1", version=version)


@pytest.fixture
async def route(tmp_path: Path) -> AsyncIterator[Route]:
    service = FeedbackProcess.prepare(tmp_path)
    key, line = api_keys.make_key("ops", "admin")
    with (tmp_path / "api-keys").open("a") as file:
        file.write(f"{line}\n")
    (tmp_path / "release.json").write_text(json.dumps(RULES))
    port = reserve_port()
    service.settings = {
        "ETUDE_FEEDBACK_RELEASE": str(tmp_path / "release.json"),
        "ETUDE_FEEDBACK_RELEASE_PORT": str(port),
        "ETUDE_FEEDBACK_HORIZON_S": "1",
    }
    await service.start()
    yield Route(service, open_store((tmp_path / "ledger").as_uri()), key, port)
    if service.process is not None and service.process.returncode is None:
        await service.stop(signal.SIGKILL)


async def test_a_better_candidate_is_promoted_and_a_harmful_one_rolled_back(route: Route) -> None:
    first = await route.ask("Promote", "first", version=served(40), without_gate=True)
    assert first.sentence == "1.40 promoted without a passed gate by ops: test"
    started = await route.propose(41, 40)
    assert started.sentence.startswith("1.41 goes to 25 % of users, compared with as many")
    canary = await route.wait_for(CANARY, 1)
    assert canary.served is not None
    assert canary.served.number == 41

    await route.service.stop(signal.SIGKILL)
    await route.service.start()
    await send_work(route.service, route.store, lambda arm: arm is Arm.TREATMENT, lambda _: False)
    stable = await route.wait_for(STABLE, 2)
    assert (stable.served and stable.served.number, stable.action) == (41, "Promote")
    assert stable.sentence.startswith("promoted: edit persistence +")
    assert (await route.propose(41, 40)).number == started.number, "the same request, once"

    assert (await route.propose(42, 41)).action == "StartCanary"
    before = newest_record(route.store, CANARY)
    assert before is not None
    await send_work(route.service, route.store, lambda _: True, lambda arm: arm is Arm.TREATMENT)
    ended = await route.wait_for(CANARY, before.number + 1)
    while ended.action == "GrowCanary":
        ended = await route.wait_for(CANARY, ended.number + 1)
    assert (ended.served, ended.action) == (None, "Rollback")
    assert ended.sentence.startswith("rolled back: complaints +")
    assert newest_record(route.store, STABLE) == stable
    assert await route.service.stop(signal.SIGTERM) == 0


async def test_only_an_admin_key_may_ask(route: Route) -> None:
    for key, code in (
        ("", grpc.StatusCode.UNAUTHENTICATED),
        ("etude_unknown", grpc.StatusCode.UNAUTHENTICATED),
        (route.service.key, grpc.StatusCode.PERMISSION_DENIED),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await route.ask("Freeze", "freeze", key=key)
        assert caught.value.code() is code
    with pytest.raises(grpc.aio.AioRpcError, match=r"caller\.request_id"):
        await route.ask("Freeze", "no spaces, please")
    assert (await route.ask("Freeze", "freeze")).sentence == "frozen by ops: test"


def _run_verb(words: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as caught, exit_with_problem():
        app(list(words))
    code = caught.value.code
    assert isinstance(code, int)
    return code


async def test_the_command_line_asks_and_shows(
    route: Route, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file = tmp_path / "admin.key"
    key_file.write_text(f"{route.key}\n")
    at = (f"--at=127.0.0.1:{route.port}", f"--key-file={key_file}")

    async def etude(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(_run_verb, words)
        said = capsys.readouterr()
        return code, said.out, said.err

    promote = ("promote", "run-1@1.40", "--without-gate", "--reason=first", "--request-id=p-1")
    said = (0, "1.40 promoted without a passed gate by ops: first\n", "")
    assert await etude(*promote, *at) == said
    assert await etude(*promote, *at) == said  # the same request: once
    assert (await etude("freeze", "--reason=holidays", *at))[:2] == (
        0,
        "frozen by ops: holidays\n",
    )
    refused = await etude("promote", "run-1@1.50", "--without-gate", *at)
    assert refused == (1, "refused: frozen by ops: holidays\n", "")
    code, text, _ = await etude("release", "status", *at)
    assert code == 0
    assert text.startswith(
        "policy   Automatic, frozen by ops: holidays\nstable   run-1@1.40   previous none\n"
    )
    code, text, _ = await etude("release", "status", "--json", *at)
    actions = [each["action"] for each in json.loads(text)["decisions"]]
    assert actions == ["Refuse", "Freeze", "Promote"]
    code, _, problem = await etude("rollback", "1.41", *at)
    assert (code, problem.splitlines()[0]) == (3, "1.41  is neither in use nor tested")
    code, _, problem = await etude("unfreeze", at[0])
    assert (code, "[Forbidden]" in problem) == (5, True)
    code, _, problem = await etude("unfreeze", f"--at=127.0.0.1:{reserve_port()}", at[1])
    assert (code, "[Unreachable]" in problem) == (6, True)


def _evaluated(folder: Path) -> None:
    """Objects of a run's folder after `etude eval`: 1.41 is better than 1.40."""
    figures = {"metric": "Success", "difference": "0.01", "low": "0.0", "high": "0.02"}
    suite = {"name": "held-out", "comparisons": [figures | {"tasks": 400}]}
    result = {"policy": "1.41", "baselinePolicy": "1.40", "suites": [suite]}
    environment = {"name": "repos", "poolRef": {"name": "shared"}, "template": "python"}
    spec = {
        "checkpointRef": {"name": "demo-s00000041-abcdef"},
        "suites": [{"name": "held-out", "uri": "file:///tasks", "environment": "repos"}],
        "environments": [environment],
    }
    source = {"uri": "file:///run/c", "manifestDigest": "0" * 64}
    checkpoint = {
        "runRef": {"name": "demo", "uid": "run-1"},
        "reason": "Window",
        "source": source,
        "storage": {"uri": "file:///run"},
    }
    objects = [
        {"kind": "EvalRun", "metadata": {"name": "held-out", "uid": "e-1"}, "spec": spec}
        | {"status": result},
        {"kind": "EvalRun", "metadata": {"name": "waiting"}, "spec": spec},
        {"kind": "EvalRun", "metadata": {"name": "alone"}, "spec": spec}
        | {"status": {"policy": "1.41"}},
        {"kind": "Checkpoint", "metadata": {"name": "demo-s00000041-abcdef"}, "spec": checkpoint},
    ]
    folder.mkdir()
    (folder / "run.yaml").touch()
    (folder / "objects.json").write_text(json.dumps(objects))


async def test_an_evaluation_of_this_machine_is_proposed_once(
    route: Route, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file = tmp_path / "admin.key"
    key_file.write_text(route.key)
    _evaluated(tmp_path / "demo")
    await route.ask("Promote", "first", version=served(40), without_gate=True)
    at = (str(tmp_path / "demo"), f"--at=127.0.0.1:{route.port}", f"--key-file={key_file}")
    for _ in range(2):
        words = ("release", "propose", "held-out", *at)
        assert await asyncio.to_thread(_run_verb, words) == 0
        said = capsys.readouterr().out
        assert said.startswith("1.41 (demo-s00000041-abcdef) goes to 25 % of users")
        assert "success of held-out better by 1.0 points" in said
    for name, problem in (
        ("waiting", "is Pending, not Complete"),
        ("alone", "comparison"),
        ("missing", "is no EvalRun of this run"),
    ):
        assert await asyncio.to_thread(_run_verb, ("release", "propose", name, *at)) > 1
        assert problem in capsys.readouterr().err
