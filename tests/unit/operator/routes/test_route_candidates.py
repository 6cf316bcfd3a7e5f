"""From a new checkpoint to its proposal: EvalRuns, the request to the service, and the answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from etude.common.api.kinds import Checkpoint, EvalRun, PolicyRoute
from etude.common.api.route.status import EvaluatedCandidate, PolicyRouteStatus
from etude.operator.manifests import Ref
from etude.operator.routes.candidates import find_candidates, position_of
from etude.v1 import release_pb2, run_pb2, weights_pb2

KEY = Ref("PolicyRoute", "lab", "coder")
TARGET = "coder-feedback-0.coder-feedback:7091"
PLAN = {
    "suites": [{"name": "held-out", "uri": "s3://inputs/held-out", "environment": "repos"}],
    "environments": [{"name": "repos", "poolRef": {"name": "shared"}, "template": "python"}],
    "samples": 4,
}
POOL = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "EnvPool",
    "metadata": {"name": "shared", "namespace": "lab", "uid": "uid-shared", "generation": 1},
    "spec": {
        "templates": [{"name": "python", "trust": "Trusted"}],
        "replicas": 1,
        "store": {"secretRef": {"name": "s3"}},
    },
}


def served(number: int, checkpoint: str = "") -> release_pb2.ServedPolicyVersion:
    version = weights_pb2.PolicyVersion(epoch=1, number=number)
    return release_pb2.ServedPolicyVersion(
        run_uid="uid-run", version=version, checkpoint=checkpoint
    )


def result(number: int, verdict: str = "", *, baseline: int = 0) -> str:
    """What the Job of an evaluation hands over."""
    suite: dict[str, Any] = {"name": "held-out", "tasks": 120, "samples": 480, "mean": "0.61"}
    about: dict[str, Any] = {"policy": f"1.{number}", "manifestDigest": "ab" * 32}
    if baseline:
        figures = {"metric": "Success", "difference": "0.031", "low": "0.012", "high": "0.05"}
        counts = {"tasks": 120, "expected": 480, "scored": 480}
        others = {"baselineExpected": 480, "baselineScored": 478}
        suite |= {"verdict": verdict, "comparisons": [figures | counts | others]}
        about |= {"verdict": verdict, "baselinePolicy": f"1.{baseline}"}
    return json.dumps(about | {"suites": [suite]})


class Releases:
    """A lab whose route evaluates what its run writes."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab

    async def save(self, number: int, reason: str = "Window") -> str:
        """The run writes a checkpoint with a version; returns its name."""
        step = 10 * number
        record = run_pb2.CheckpointRecord(
            step=step,
            reason=reason,
            uri=f"s3://runs/demo/checkpoints/{step:012d}",
            manifest_digest=f"{step:064x}",
            size_bytes=10,
            policy_version=number,
        )
        await self.lab.tell(record)
        await self.lab.finish_jobs()
        await self.lab.advance(40)
        return f"demo-s{step:08d}-000000"

    async def report(self, stable: int, **more: Any) -> None:
        said = release_pb2.GetReleaseStatusResponse(
            policy="Automatic", stable=served(stable), **more
        )
        self.lab.peers.releases[TARGET].append(said)
        await self.lab.advance(40)

    def evaluations(self) -> dict[str, EvalRun]:
        found = self.lab.cluster.objects().items()
        return {k.name: EvalRun.parse_known_fields(m) for k, m in found if k.kind == "EvalRun"}

    def evaluation_of(self, checkpoint: str) -> EvalRun:
        return next(
            each
            for each in self.evaluations().values()
            if each.spec.checkpoint_ref is not None and each.spec.checkpoint_ref.name == checkpoint
        )

    async def end(self, evaluation: EvalRun, message: str = "", *, exit_code: int = 0) -> None:
        """The newest pod of an evaluation's Job ends."""
        name = evaluation.metadata.name
        pods = [
            key
            for key in self.lab.cluster.objects()
            if key.kind == "Pod" and key.name.startswith(f"{name}-evaluator-")
        ]
        ended = {"exitCode": exit_code, "message": message}
        state = {"name": "evaluator", "state": {"terminated": ended}}
        phase = "Failed" if exit_code else "Succeeded"
        status = {"phase": phase, "containerStatuses": [state]}
        self.lab.cluster.set_status(max(pods), status)
        await self.lab.advance(40)

    def condition(self) -> tuple[str, str]:
        found = next(c for c in self.status.conditions if c.type == "CandidateProposed")
        return found.status, found.reason

    @property
    def status(self) -> Any:
        return PolicyRoute.parse_known_fields(self.lab.cluster.objects()[KEY]).status

    @property
    def candidate(self) -> EvaluatedCandidate:
        found = self.status.candidate
        assert isinstance(found, EvaluatedCandidate)
        return found

    @property
    def proposals(self) -> list[Any]:
        return [each for each in self.lab.peers.release_orders if each.proposal is not None]


async def prepare(lab: Any, run_body: Any, route_body: Any, **spec: Any) -> Releases:
    """Version 1 is in use, and its checkpoint is there."""
    lab.cluster.upsert(run_body())
    lab.cluster.upsert(POOL)
    lab.cluster.upsert(route_body(**{"gate": {"evaluation": PLAN}, **spec}))
    await lab.settle()
    releases = Releases(lab)
    await releases.save(1)
    await releases.report(1)
    return releases


@pytest.fixture
async def releases(lab: Any, run_body: Any, route_body: Any) -> Releases:
    return await prepare(lab, run_body, route_body)


async def test_a_version_that_was_promoted_by_its_number_has_its_checkpoint_in_the_status(
    releases: Releases,
) -> None:
    assert releases.status.stable.checkpoint == "demo-s00000010-000000"
    await releases.report(7)
    stable = releases.status.stable
    assert (stable.version, stable.checkpoint) == ("1.7", ""), "no checkpoint holds it"


async def test_a_new_checkpoint_is_evaluated_against_the_version_in_use_and_proposed_once(
    releases: Releases,
) -> None:
    assert releases.condition() == ("False", "NoNewCheckpoint")
    assert releases.evaluations() == {}
    name = await releases.save(2)
    baseline = releases.evaluation_of("demo-s00000010-000000")
    evaluation = releases.evaluation_of(name)
    comparison = evaluation.spec.comparison
    assert comparison is not None
    assert comparison.baseline_ref.name == baseline.metadata.name
    assert evaluation.metadata.owner_references[0].uid == "uid-route"
    assert (releases.condition(), releases.candidate.checkpoint) == (("False", "Evaluating"), name)
    await releases.end(baseline, result(1))
    await releases.end(evaluation, result(2, "Passed", baseline=1))
    assert [each.request_id for each in releases.proposals] == [
        f"propose-{evaluation.metadata.uid}"
    ]
    proposal = releases.proposals[0].proposal
    assert (proposal.candidate, proposal.compared_with) == (served(2, name), served(1))
    figures = proposal.comparisons[0]
    assert (figures.metric, figures.low, figures.served_samples.scored) == (
        "success of held-out",
        0.012,
        478,
    )
    assert releases.condition() == ("True", "Proposed")
    await releases.lab.advance(3600)
    assert (len(releases.evaluations()), len(releases.proposals)) == (2, 1)


async def test_an_evaluation_without_enough_data_is_told_once_and_not_repeated(
    releases: Releases,
) -> None:
    releases.lab.peers.refusal = "1.2 stopped by the gate: not enough data"
    name = await releases.save(2)
    await releases.end(releases.evaluation_of("demo-s00000010-000000"), result(1))
    await releases.end(releases.evaluation_of(name), result(2, "NotEnoughData", baseline=1))
    assert releases.condition() == ("False", "NotEnoughData")
    assert releases.candidate.action == "Refuse"
    await releases.lab.advance(7200)
    assert len(releases.proposals) == 1
    events = [e for e in releases.lab.cluster.events if e["reason"] == "NotEnoughData"]
    assert [each["type"] for each in events] == ["Warning"]


def is_alarming() -> bool:
    """The metric of the alert about the route."""
    names = ("namespace", "kind", "name", "condition", "reason")
    values = ("lab", "PolicyRoute", "coder", "CandidateProposed", "EvaluationFailed")
    found = REGISTRY.get_sample_value(
        "etude_condition_unhealthy", dict(zip(names, values, strict=True))
    )
    return bool(found)


async def test_a_failed_evaluation_is_told_and_repeated_only_by_a_person(
    releases: Releases,
) -> None:
    name = await releases.save(2)
    await releases.end(releases.evaluation_of("demo-s00000010-000000"), result(1))
    for _ in range(8):
        if releases.condition() == ("False", "EvaluationFailed"):
            break
        await releases.end(releases.evaluation_of(name), "no engine", exit_code=78)
    failed = releases.evaluation_of(name)
    assert releases.condition() == ("False", "EvaluationFailed")
    await releases.lab.advance(60)
    assert is_alarming(), "later checkpoints may be blocked too"
    await releases.lab.advance(7200)
    assert releases.evaluation_of(name).metadata.uid == failed.metadata.uid
    releases.lab.cluster.purge(Ref("EvalRun", "lab", failed.metadata.name))
    await releases.lab.advance(40)
    assert releases.evaluation_of(name).metadata.uid != failed.metadata.uid
    await releases.lab.advance(60)
    assert not is_alarming()
    assert releases.condition() == ("False", "Evaluating")


async def test_a_newer_checkpoint_replaces_a_waiting_one_but_not_one_under_way(
    releases: Releases,
) -> None:
    second = await releases.save(2)
    third = await releases.save(3)
    references = [each.spec.checkpoint_ref for each in releases.evaluations().values()]
    checkpoints = {each.name for each in references if each is not None}
    assert second not in checkpoints
    await releases.end(releases.evaluation_of("demo-s00000010-000000"), result(1))
    await releases.save(4)
    assert releases.candidate.checkpoint == third
    await releases.end(releases.evaluation_of(third), result(3, "Passed", baseline=1))
    assert [each.proposal.candidate for each in releases.proposals] == [served(3, third)]


async def test_evaluations_under_way_end_with_the_plan_of_their_route(
    releases: Releases, route_body: Any
) -> None:
    name = await releases.save(2)
    baseline = releases.evaluation_of("demo-s00000010-000000")
    await releases.end(baseline, result(1))
    assert not releases.evaluation_of(name).status.completion_time
    releases.lab.cluster.upsert(route_body(gate={}))
    await releases.lab.advance(40)
    assert [*releases.evaluations()] == [baseline.metadata.name], "a result stays"


async def test_what_a_hostile_service_tests_fits_the_schema(releases: Releases) -> None:
    tested = served(2**64 - 1, "y" * 10_000)
    await releases.report(1, canary=release_pb2.CanaryStatus(candidate=tested, share=100))
    written = PolicyRoute.parse_known_fields(releases.lab.cluster.objects()[KEY]).status
    assert PolicyRouteStatus.model_validate(written.to_json()) == written
    assert (releases.candidate.number, releases.condition()) == (2**63 - 1, ("True", "Proposed"))


async def test_a_route_says_what_its_evaluation_waits_for(releases: Releases) -> None:
    releases.lab.cluster.purge(Ref("EnvPool", "lab", "shared"))
    await releases.save(2)
    await releases.lab.advance(40)
    message = next(c.message for c in releases.status.conditions if c.type == "CandidateProposed")
    assert "no EnvPool shared in this namespace" in message


async def test_nothing_new_is_evaluated_while_users_try_a_candidate(releases: Releases) -> None:
    canary = release_pb2.CanaryStatus(candidate=served(2, "demo-s00000020-000000"), share=100)
    await releases.report(1, canary=canary)
    await releases.save(3)
    assert (releases.evaluations(), releases.condition()) == ({}, ("True", "Proposed"))
    await releases.report(1)
    assert releases.candidate.number == 3


@pytest.mark.parametrize("policy", ["Manual", "Frozen"])
async def test_people_decide_where_the_policy_says_so(
    policy: str, lab: Any, run_body: Any, route_body: Any
) -> None:
    releases = await prepare(lab, run_body, route_body, policy=policy)
    await releases.save(2)
    assert (releases.evaluations(), releases.condition()) == ({}, ("False", "NotAutomatic"))


async def test_an_operator_that_dies_at_any_write_makes_no_second_evaluation(
    lab_of: Any, run_body: Any, route_body: Any
) -> None:
    whole = await prepare(lab_of(), run_body, route_body)
    begin = len(whole.lab.writes)
    await whole.save(2)
    made = set(whole.evaluations())
    for write in range(begin + 1, len(whole.lab.writes) + 1, 4):
        lab = lab_of(is_lagging=True, seed=write)
        releases = await prepare(lab, run_body, route_body)
        lab.kill_at = len(lab.writes) + write - begin
        await releases.save(2)
        await releases.lab.advance(40)
        assert len(releases.evaluations()) == len(made) == 2, write


def checkpoint(branch: int, number: int, reason: str, *, is_ready: bool) -> Checkpoint:
    name = f"demo-b{branch}-{number}-{reason.lower()}"
    condition = {"type": "Ready", "status": "True" if is_ready else "False", "reason": "Verified"}
    return Checkpoint.parse_known_fields(
        {
            "metadata": {"name": name},
            "spec": {
                "reason": reason,
                "runRef": {"name": "demo", "uid": "uid-run"},
                "source": {"uri": "s3://runs/demo/c", "manifestDigest": "0" * 64},
                "storage": {"uri": "s3://runs/demo"},
                "branch": branch,
                "policyVersion": number,
            },
            "status": {"conditions": [condition]},
        }
    )


CHECKPOINTS = st.lists(
    st.builds(
        checkpoint,
        st.integers(0, 2),
        st.integers(0, 9),
        st.sampled_from(["Window", "Final", "Scheduled", "Suspend"]),
        is_ready=st.booleans(),
    ),
    unique_by=lambda each: each.metadata.name,
)


@given(CHECKPOINTS, st.integers(0, 9), st.integers(0, 2), st.integers(0, 9))
def test_a_candidate_is_newer_than_all_that_was_tried_and_stays_one_until_it_was(
    checkpoints: list[Checkpoint], stable: int, branch: int, number: int
) -> None:
    tried = EvaluatedCandidate(branch=branch, number=number, action="Refuse")
    found = find_candidates(checkpoints, served(stable), tried)
    positions = [position_of(each) for each in found]
    assert positions == sorted(set(positions), reverse=True)
    assert all(each > (branch, number) for each in positions)
    assert {each.spec.reason for each in found} <= {"Window", "Final"}
    if found:
        newest = EvaluatedCandidate(branch=positions[0].branch, number=positions[0].number)
        assert find_candidates(checkpoints, served(stable), newest)[:1] == found[:1]
        done = newest.model_copy(update={"action": "StartCanary"})
        assert find_candidates(checkpoints, served(stable), done) == []
