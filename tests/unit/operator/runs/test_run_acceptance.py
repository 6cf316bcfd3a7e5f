"""Problems that keep a run from being accepted, and what goes on without it."""

from typing import Any

import pytest

from etude.operator.kube.interface import ApiRejectedError
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Ref
from etude.v1 import run_pb2


async def test_a_name_that_is_taken_is_reported_and_left_alone(lab: Any, run_body: Any) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "demo-run", "namespace": "lab"},
        "data": {"theirs": "yes"},
    }
    lab.cluster.upsert(foreign)
    lab.cluster.upsert(run_body())
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "NameConflict")
    assert lab.run().status.phase == "Pending"
    kept = lab.cluster.objects()[Ref("ConfigMap", "lab", "demo-run")]
    assert kept["data"] == {"theirs": "yes"}
    lab.cluster.remove(Ref("ConfigMap", "lab", "demo-run"))
    await lab.advance(31)
    assert lab.condition("Accepted")[0] == "True"
    assert len(lab.names("Pod")) == 7


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"storage": {"uri": "file:///data"}}, "InvalidParameters", "spec.storage.uri"),
        ("algorithm", "InvalidParameters", "spec.phases[1].algorithm.parameters"),
        ("updates", "InvalidParameters", "updatesPerBatch: 4 updates cannot share 2 groups"),
        ("env", "InvalidParameters", "ETUDE_PORT is set by the operator"),
        ("home", "InvalidParameters", "spec.roles.rewards.env: HOME is set by the operator"),
        ("pool", "PoolNotFound", "spec.roles.environments[0].poolRef.name: no EnvPool shared"),
        ("template", "InvalidParameters", "spec.roles.environments[0].template: rust is not in"),
        ("root", "InvalidParameters", "[0].poolTemplate.isolation.driver: Firecracker needs root"),
    ],
)
async def test_what_no_schema_can_judge_is_refused_with_the_field(
    lab: Any, run_body: Any, spec: Any, reason: str, words: str
) -> None:
    body = run_body(**spec) if isinstance(spec, dict) else run_body()
    roles = body["spec"]["roles"]
    match spec:
        case "algorithm":
            body["spec"]["phases"][1]["algorithm"] = {"name": "DrGRPO", "parameters": {"x": 1}}
        case "updates":
            parameters = {"updatesPerBatch": 4}
            body["spec"]["phases"][1]["algorithm"] = {
                "name": "DrGRPO",
                "promptsPerStep": 2,
                "parameters": parameters,
            }
        case "env":
            roles["trainer"] = {"env": [{"name": "ETUDE_PORT", "value": "1"}]}
        case "home":
            roles["rewards"]["env"] = [{"name": "HOME", "value": "/root"}]
        case "pool":
            roles["environments"][0].pop("poolTemplate")
            roles["environments"][0]["poolRef"] = {"name": "shared"}
        case "template":
            roles["environments"][0]["template"] = "rust"
        case "root":
            isolation = {"driver": "Firecracker"}
            roles["environments"][0]["poolTemplate"]["isolation"] = isolation
        case _:
            assert isinstance(spec, dict)
    lab.cluster.upsert(body)
    await lab.settle()
    assert lab.condition("Accepted") == ("False", reason)
    assert words in next(c.message for c in lab.run().status.conditions if c.type == "Accepted")
    assert lab.names("StatefulSet") == []
    lab.cluster.upsert(run_body())
    await lab.settle()
    assert lab.condition("Accepted")[0] == "True"


async def test_replay_that_does_not_fit_the_updates_of_a_batch_is_refused_with_the_field(
    lab: Any, run_body: Any
) -> None:
    for mode in ("Recorded", "Recompute"):
        body = run_body()
        phase = body["spec"]["phases"][1]
        phase |= {"algorithm": {"name": "GSPO"}, "routerReplay": {"mode": mode}}
        lab.cluster.upsert(body)
        await lab.settle()
        if mode == "Recorded":
            assert lab.condition("Accepted") == ("False", "InvalidParameters")
            found = next(c for c in lab.run().status.conditions if c.type == "Accepted")
            assert "spec.phases[1].routerReplay.mode: recorded experts" in found.message
    assert lab.condition("Accepted")[0] == "True"


async def test_adapters_whose_phase_is_to_balance_experts_are_refused(
    lab: Any, run_body: Any
) -> None:
    body = run_body()
    body["spec"]["roles"]["trainer"]["lora"] = {"rank": 4, "targetModules": ["o_proj"]}
    body["spec"]["phases"][1]["optimizer"]["expertBiasRate"] = "0.001"
    lab.cluster.upsert(body)
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "InvalidParameters")
    found = next(c for c in lab.run().status.conditions if c.type == "Accepted")
    assert "spec.phases[1].optimizer.expertBiasRate: adapters alone" in found.message


async def test_parameters_of_a_curriculum_are_refused_with_the_field(
    lab: Any, run_body: Any
) -> None:
    # The trainer's image may have packages that the operator's has not.
    for name, given in (("SolveRateBand", "half"), ("SolveRateBand", "0.5"), ("acme.Other", "1")):
        body = run_body()
        body["spec"]["phases"][1]["curriculum"] = {"name": name, "parameters": {"target": given}}
        lab.cluster.upsert(body)
        await lab.settle()
        if given == "half":
            assert lab.condition("Accepted") == ("False", "InvalidParameters")
            found = next(c for c in lab.run().status.conditions if c.type == "Accepted")
            assert "spec.phases[1].curriculum: parameters.target: " in found.message
        else:
            assert lab.condition("Accepted")[0] == "True"


@pytest.mark.parametrize(("gpus", "is_accepted"), [(0, "False"), (1, "True")])
async def test_a_budget_of_gpus_that_nobody_counts_is_refused(
    lab: Any, run_body: Any, gpus: int, is_accepted: str
) -> None:
    body = run_body(budget={"gpuHours": "100"})
    claim = {"name": "gpu", "resourceClaimTemplateName": "h100"}
    body["spec"]["roles"]["inference"] |= {"resourceClaims": [claim], "gpusPerReplica": gpus}
    lab.cluster.upsert(body)
    await lab.settle()
    found = next(c for c in lab.run().status.conditions if c.type == "Accepted")
    assert found.status == is_accepted
    assert ("spec.budget.gpuHours: GPUs that come" in found.message) == (not gpus)


async def test_a_run_that_has_begun_is_not_stopped_by_such_a_budget(
    running: Any, run_body: Any
) -> None:
    """As one that an earlier release took."""
    body = run_body(budget={"gpuHours": "100"})
    claim = {"name": "gpu", "resourceClaimTemplateName": "h100"}
    body["spec"]["roles"]["inference"] |= {"resourceClaims": [claim], "gpusPerReplica": 0}
    running.cluster.upsert(body)
    await running.settle()
    assert running.condition("Accepted")[0] == "True"
    running.end("demo-trainer-0", exit_code=1)
    await running.settle()
    await running.advance(60)
    assert running.run().status.attempt == 1
    assert running.run().status.intent is None


async def test_a_run_that_is_over_stays_so_when_its_spec_is_not_understood_for_a_while(
    running: Any, run_body: Any
) -> None:
    await running.say(state=run_pb2.RUN_STATE_FAILED, reason="Broken", message="for good")
    assert running.condition("Failed") == ("True", "Broken")
    key, body = Ref("RLRun", "lab", "demo"), run_body()
    body["spec"]["phases"][0]["type"] = "OfTheFuture"
    running.cluster.upsert(body)
    await running.settle()
    said = running.cluster.objects()[key]["status"]
    facts = {each["type"]: each["status"] for each in said["conditions"]}
    assert (facts["Accepted"], facts["Failed"], said["phase"]) == ("False", "True", "Failed")
    running.cluster.upsert(run_body())
    await running.settle()
    assert running.condition("Failed") == ("True", "Broken")
    assert running.names("Pod") == []


async def test_an_object_that_an_older_schema_let_through_is_refused_by_name(
    lab: Any, run_body: Any
) -> None:
    body = run_body()
    body["spec"]["phases"][0]["type"] = "Surprise"
    lab.cluster.upsert(body)
    await lab.settle()
    status = lab.cluster.objects()[Ref("RLRun", "lab", "demo")]["status"]
    accepted = status["conditions"][0]
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert "phases.0.type" in accepted["message"]


@pytest.fixture
def refusals(lab: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Names that the API server refuses to write, with how often; its words count along."""
    refused: dict[str, int] = {}
    apply = lab.cluster.apply

    async def picky(self: Any, manifest: Any, *, manager: str) -> Any:
        name = manifest["metadata"]["name"]
        if name in refused:
            refused[name] += 1
            raise ApiRejectedError(f"{name}: exceeded quota, used: {refused[name]}")
        return await apply(manifest, manager=manager)

    monkeypatch.setattr(MemoryCluster, "apply", picky)
    return refused


async def test_a_refused_child_keeps_nothing_else_from_being_done(
    running: Any, run_body: Any, refusals: dict[str, int]
) -> None:
    refusals["demo-run"] = 0
    running.cluster.upsert(run_body(suspend=True))
    await running.settle()
    assert [o.WhichOneof("what") for o in running.peers.commands] == ["suspend"]
    await running.say(state=run_pb2.RUN_STATE_SUSPENDED, step=1)
    assert running.condition("Suspended") == ("True", "ByUser")
    assert running.condition("Accepted") == ("False", "Refused")
    assert running.names("Pod") == []


async def test_nothing_new_is_made_after_a_refusal_and_it_is_told_once(
    lab: Any, run_body: Any, refusals: dict[str, int]
) -> None:
    refusals["demo-run"] = 0
    lab.cluster.upsert(run_body())
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "Refused")
    assert lab.names("StatefulSet") == []
    before = len(lab.writes)
    for _ in range(3):
        await lab.advance(31)
    assert lab.writes[before:] == []
    assert 3 <= refusals["demo-run"] <= 8
    refusals.clear()
    await lab.advance(31)
    assert lab.condition("Accepted")[0] == "True"


async def test_a_checkpoint_that_is_refused_is_registered_later(
    running: Any, refusals: dict[str, int]
) -> None:
    refusals["demo-s00000010-000000"] = 0
    await running.tell_checkpoint(10)
    assert running.names("Checkpoint") == []
    refusals.clear()
    await running.advance(31)
    assert running.names("Checkpoint") == ["demo-s00000010-000000"]
