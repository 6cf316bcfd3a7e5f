"""Why a route serves nobody, or its newest checkpoint does not reach users."""

from collections.abc import Mapping
from typing import Any

from tests.support.kube.observed_runs import (
    Manifest,
    before,
    condition,
    ended,
    event,
    pod,
    pool,
    waiting,
)

from etude.cli.kubectl.diagnose.diagnosis import Diagnosis, RunState
from etude.cli.kubectl.diagnose.evaluations import NamespaceObjects, diagnose_evaluation
from etude.cli.kubectl.diagnose.routes import diagnose_route

SERVING = (
    condition("Accepted", "True", "Accepted"),
    condition("Available", "True", "Serving"),
    condition("FeedbackAvailable", "True", "Serving"),
    condition("Degraded", "False", "Healthy"),
)
UNSERVED = condition("Available", "False", "NotServing", "no gateway is ready")


def route(*changed: Manifest, **status: Any) -> Manifest:
    """A route that serves 1.40, but for what changed."""
    known = {each["type"]: each for each in (*SERVING, *changed)}
    stable = {"version": "1.40", "since": before(3600)}
    found = {"observedGeneration": 1, "conditions": list(known.values()), "stable": stable}
    return {
        "kind": "PolicyRoute",
        "metadata": {"name": "coder", "namespace": "lab", "uid": "uid-coder", "generation": 1},
        "spec": {},
        "status": found | status,
    }


def evaluation(*conditions: Manifest, name: str = "coder-v41", baseline: str = "") -> Manifest:
    """An evaluation whose Job runs, but for its conditions."""
    comparison = {"comparison": {"baselineRef": {"name": baseline}}} if baseline else {}
    environment = {"name": "repos", "poolRef": {"name": "swe"}, "template": "python"}
    usual = (
        condition("Accepted", "True", "Accepted"),
        condition("Complete", "False", "Evaluating", "its Job drives the rollouts"),
    )
    return {
        "kind": "EvalRun",
        "metadata": {"name": name, "namespace": "lab", "uid": f"uid-{name}", "generation": 1},
        "spec": {"environments": [environment], **comparison},
        "status": {"observedGeneration": 1, "conditions": list(conditions or usual)},
    }


def part(label: str, owner: str, role: str, container: Mapping[str, Any]) -> Manifest:
    """A pod of a route or an evaluation that is not ready."""
    found = pod(role, ready=False, container=container)
    labels = {label: owner, "etude.dev/role": role}
    found["metadata"] |= {"name": f"{owner}-{role}-0", "labels": labels}
    return found


def of_route(found: Manifest, **around: Any) -> Diagnosis:
    return diagnose_route(found, NamespaceObjects(**around))


def of_evaluation(found: Manifest, **around: Any) -> Diagnosis:
    return diagnose_evaluation(found, NamespaceObjects(**{"pools": [pool()]} | around))


def test_a_missing_secret_of_a_gateway_is_named_with_its_fix() -> None:
    gateway = part("etude.dev/route", "coder", "gateway", waiting("ContainerCreating"))
    words = 'MountVolume.SetUp failed for volume "keys" : secret "coder-keys" not found'
    found = of_route(route(UNSERVED), pods=[gateway], events=[event(gateway, "FailedMount", words)])
    assert (found.state, found.reason) == (RunState.UNSERVED, "FailedMount")
    assert words in found.evidence[0]
    assert found.do == "create the Secret that is named, in the namespace of the pod"
    assert found.runbook.endswith("users-are-not-served.md")


def test_an_image_that_is_absent_is_named_before_what_only_starts() -> None:
    starting = part("etude.dev/route", "coder", "canary", {"state": {"running": {}}})
    words = "manifest unknown"
    broken = part("etude.dev/route", "coder", "stable", waiting("ImagePullBackOff", words))
    found = of_route(route(UNSERVED, stable={}), pods=[starting, broken])
    assert (found.state, found.reason) == (RunState.UNSERVED, "ImagePullFailed")
    assert "push it" in found.do


def test_an_absent_image_is_seen_in_the_sidecar_that_starts_first() -> None:
    broken = part("etude.dev/route", "coder", "stable", waiting("PodInitializing"))
    words = {"name": "certificates", "image": "localhost/etude-engine:9", "restartCount": 0}
    broken["status"]["initContainerStatuses"] = [words | waiting("ErrImagePull", "not found")]
    lacking = part("etude.dev/route", "coder", "gateway", waiting("PodInitializing"))
    mount = event(lacking, "FailedMount", 'secret "coder-keys" not found')
    found = of_route(route(UNSERVED), pods=[broken, lacking], events=[mount])
    causes = {found.cause, *found.evidence}
    assert any("localhost/etude-engine:9" in each for each in causes)
    assert any("coder-gateway-0 has a node" in each for each in causes)


def test_a_route_without_a_version_asks_for_the_first_promotion() -> None:
    engine = part("etude.dev/route", "coder", "stable", {"state": {"running": {}}})
    found = of_route(route(UNSERVED, stable={}), pods=[engine])
    assert (found.state, found.reason) == (RunState.UNSERVED, "NoStableVersion")
    assert "kubectl etude promote" in found.do


def test_a_part_that_starts_again_leaves_users_served() -> None:
    engine = part("etude.dev/route", "coder", "canary", {"state": {"running": {}}})
    found = of_route(route(canary={"version": "1.41"}), pods=[engine])
    assert (found.state, found.reason) == (RunState.SERVES, "PodsNotReady")
    assert "{run}" not in found.do


def test_a_canary_engine_without_a_version_keeps_nobody_waiting() -> None:
    engine = part("etude.dev/route", "coder", "canary", {"state": {"running": {}}})
    assert of_route(route(), pods=[engine]).reason == "Serving"
    unserved = of_route(route(UNSERVED), pods=[engine])
    assert (unserved.state, unserved.reason) == (RunState.WAITS, "PodsNotReady")


def test_the_end_of_an_engine_is_told_without_a_run() -> None:
    engine = part("etude.dev/route", "coder", "stable", {"state": ended(78, "bad --gpu")})
    found = of_route(route(UNSERVED), pods=[engine])
    assert (found.state, found.reason) == (RunState.UNSERVED, "CrashLooping")
    assert "bad --gpu" in found.evidence[0]
    assert found.do == "kubectl logs POD --previous shows how it ended"


def test_a_question_to_a_person_comes_before_the_next_candidate() -> None:
    asked = {"share": "50 %", "question": "complaints are worse: promote it or roll it back"}
    found = of_route(route(test=asked, canary={"version": "1.41"}))
    assert (found.state, found.reason) == (RunState.SERVES, "PersonAsked")
    assert asked["question"] in found.evidence
    assert "50 % of the users try 1.41" in found.evidence
    assert found.do == "kubectl etude promote coder, or kubectl etude rollback coder"


def test_a_candidate_that_cannot_be_evaluated_is_followed_to_the_cause() -> None:
    words = "spec.environments[0].poolRef.name: no EnvPool swe in this namespace"
    stuck = evaluation(condition("Accepted", "False", "PoolNotFound", words), name="coder-v40")
    mine = evaluation(
        condition("Accepted", "False", "WaitingForBaseline", "coder-v40 is Pending"),
        baseline="coder-v40",
    )
    proposed = condition("CandidateProposed", "False", "Evaluating", "1.41 is evaluated")
    candidate = {"evaluation": "coder-v41", "action": ""}
    found = of_route(route(proposed, candidate=candidate), evaluations=[mine, stuck])
    assert (found.state, found.reason) == (RunState.SERVES, "PoolNotFound")
    assert words in found.evidence
    assert "create the EnvPool" in found.do


def test_a_route_without_trouble_tells_what_is_in_use() -> None:
    proposed = condition("CandidateProposed", "False", "NoNewCheckpoint", "none is newer")
    decision = {"action": "Promote", "sentence": "promoted: edit persistence +2.1 points"}
    found = of_route(route(proposed, decision=decision))
    assert (found.state, found.reason) == (RunState.SERVES, "NoNewCheckpoint")
    assert any("1.40 is in use since" in line for line in found.evidence)
    assert any(decision["sentence"] in line for line in found.evidence)


def test_an_evaluation_waits_for_its_baseline_and_tells_what_that_waits_for() -> None:
    held = evaluation(name="coder-v40")
    mine = evaluation(
        condition("Accepted", "False", "WaitingForBaseline", "coder-v40 is Running"),
        baseline="coder-v40",
    )
    found = of_evaluation(mine, evaluations=[mine, held])
    assert (found.state, found.reason) == (RunState.WAITS, "WaitingForBaseline")
    assert any("coder-v40 progresses" in line for line in found.evidence)


def test_an_evaluation_without_hosts_names_the_pool() -> None:
    empty = pool(condition("Available", "False", "ScaledToZero", "spec.replicas is 0"))
    found = of_evaluation(evaluation(), pools=[empty])
    assert (found.state, found.reason) == (RunState.STANDS_STILL, "ScaledToZero")
    assert found.do == "kubectl scale envp swe --replicas=N"
    assert of_evaluation(evaluation(), pools=[]).reason == "PoolNotFound"


def test_the_end_of_an_evaluation_is_its_diagnosis() -> None:
    words = "s3://inputs/held-out has no task folders"
    for reason, fix in (
        ("EvaluationFailed", "an EvalRun of another name"),
        ("InvalidParameters", "correct spec.gate.evaluation"),
    ):
        found = of_evaluation(evaluation(condition("Failed", "True", reason, words)))
        assert (found.state, found.reason) == (RunState.FAILED, reason)
        assert words in found.evidence
        assert fix in found.do
    done = of_evaluation(evaluation(condition("Complete", "True", "Evaluated", "mean 0.6")))
    assert (done.state, done.do) == (RunState.OVER, "")


def test_an_operator_that_is_silent_is_told_first() -> None:
    unseen = route(UNSERVED, observedGeneration=0)
    assert of_route(unseen).reason == "OperatorSilent"
    assert of_route(unseen).as_json()["route"] == "coder"
