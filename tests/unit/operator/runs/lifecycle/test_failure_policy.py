"""Rules of a failure policy; for the defaults see test_run_failures."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from etude.common.api.run.lifecycle import ExitCodes, FailureAction, FailureRule
from etude.operator.kube.memory_cluster import InstantKubelet, Kubelet, MemoryCluster
from etude.operator.manifests import Manifest, Ref, is_deleting, labels
from etude.operator.pod_failures import PodFailure, find_failures
from etude.operator.runs.lifecycle import failure_policy
from etude.operator.runs.lifecycle.failure_policy import FailureOutcome, FailureVerdict
from etude.v1 import run_pb2

Build = Callable[..., dict[str, Any]]
ROLES = ("trainer", "inference", "rewards")
CODES = st.integers(min_value=0, max_value=255)


def rule(name: str, action: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "cause": "Exit", "action": action, **fields}


def exits(role: str, code: int, *, restarts: int = 0) -> PodFailure:
    return PodFailure(role, f"demo-{role}-0", "Error", code, "", restarts)


def parsed(*rules: dict[str, Any]) -> list[FailureRule]:
    return [FailureRule.model_validate(each) for each in rules]


@given(st.sampled_from(ROLES), CODES, st.sets(CODES, min_size=1), st.sampled_from(["In", "NotIn"]))
def test_a_rule_about_codes_matches_them_or_all_others(
    role: str, code: int, values: set[int], op: str
) -> None:
    codes = ExitCodes.model_validate({"op": op, "values": sorted(values)})
    found = failure_policy.judge_failure(
        exits(role, code), parsed(rule("r", "Ignore", exitCodes=codes.to_json()))
    )
    matches = (code in values) if op == "In" else (code not in values)
    assert (found == FailureVerdict(FailureOutcome.IGNORE, "r")) == matches
    if not matches:
        assert found == failure_policy.judge_failure(exits(role, code))


@given(st.lists(st.sampled_from(list(FailureAction)), min_size=1, max_size=6))
def test_the_first_rule_that_matches_decides(actions: list[FailureAction]) -> None:
    rules = parsed(*(rule(f"r{n}", action) for n, action in enumerate(actions)))
    assert failure_policy.judge_failure(exits("trainer", 1), rules).rule == "r0"


@pytest.mark.parametrize(
    ("goes", "count"), [({}, 1), ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, 0)]
)
def test_a_pod_that_was_told_to_go_does_not_fail_by_going(goes: dict[str, str], count: int) -> None:
    ended = {"exitCode": 143, "reason": "Error", "message": "told to go"}
    status = {"containerStatuses": [{"name": "main", "state": {"terminated": ended}}]}
    pod = {"kind": "Pod", "metadata": {"name": "demo-trainer-0", **goes}, "status": status}
    assert len(find_failures("trainer", [pod])) == count


def ray_pod(kind: str, last: dict[str, Any], now: dict[str, Any]) -> Manifest:
    """A pod of a trainer whose container ended once."""
    container = {"name": "trainer", "state": now, "lastState": {"terminated": last}}
    metadata = {"name": f"demo-{kind}", "labels": {"ray.io/node-type": kind}}
    return {"kind": "Pod", "metadata": metadata, "status": {"containerStatuses": [container]}}


@pytest.mark.parametrize(
    ("head_code", "worker_began", "worker_ended", "now", "outcome"),
    [
        (75, "09:00", "10:01", {"waiting": {}}, FailureOutcome.IGNORE),
        (75, "10:02", "10:03", {"waiting": {}}, FailureOutcome.IGNORE),
        (75, "09:00", "10:01", {"running": {"startedAt": "10:05"}}, FailureOutcome.IGNORE),
        (75, "10:06", "11:00", {"running": {"startedAt": "10:05"}}, FailureOutcome.RESTART_ROLE),
        (75, "09:00", "09:59", {"waiting": {}}, FailureOutcome.RESTART_ROLE),
        (1, "09:00", "10:01", {"waiting": {}}, FailureOutcome.RESTART_ROLE),
    ],
)
def test_ray_workers_that_end_with_a_head_that_awaits_its_store_are_no_failure(
    head_code: int,
    worker_began: str,
    worker_ended: str,
    now: dict[str, Any],
    outcome: FailureOutcome,
) -> None:
    head = ray_pod("head", {"exitCode": head_code, "finishedAt": "10:00"}, now)
    worker_end = {"exitCode": 1, "startedAt": worker_began, "finishedAt": worker_ended}
    worker = ray_pod("worker", worker_end, {"waiting": {}})
    failures = find_failures("trainer", [worker, head])
    judged = failure_policy.gravest_failure(failures, (), has_begun=True)
    assert (judged.verdict.outcome if judged else FailureOutcome.IGNORE) is outcome
    # In a run that never began its store may be a wrong address.
    first = failure_policy.gravest_failure(failures, (), has_begun=False)
    assert first is not None
    assert first.verdict.outcome is FailureOutcome.RESTART_ROLE
    rules = parsed(rule("workers", "FailRun", exitCodes={"values": [1]}))
    by_rule = failure_policy.gravest_failure(failures, rules, has_begun=True)
    assert by_rule is not None
    assert by_rule.verdict.rule == "workers"


def test_a_rule_about_one_role_leaves_the_others_alone() -> None:
    rules = parsed(rule("engines", "FailRun", role="inference"))
    assert failure_policy.judge_failure(exits("inference", 1), rules).outcome is FailureOutcome.FAIL
    assert (
        failure_policy.judge_failure(exits("trainer", 1), rules).outcome
        is FailureOutcome.RESTART_ROLE
    )


@given(st.lists(st.tuples(st.sampled_from(ROLES), CODES), max_size=6), st.randoms())
def test_of_several_failures_the_gravest_decides_in_any_order(
    found: list[tuple[str, int]], random: Any
) -> None:
    failures = [exits(role, code) for role, code in found]
    first = failure_policy.gravest_failure(failures, ())
    random.shuffle(failures)
    second = failure_policy.gravest_failure(failures, ())
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert first.verdict == second.verdict


@pytest.fixture
async def running(lab: Any, run_body: Build, request: pytest.FixtureRequest) -> Any:
    policy = {"rules": request.param} if hasattr(request, "param") else {}
    lab.cluster.upsert(run_body(failurePolicy=policy))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    return lab


def ruled(*rules: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("running", [list(rules)], indirect=True)


@ruled(rule("out-of-memory", "RestartRun", exitCodes={"values": [137]}))
async def test_restart_run_replaces_the_pods_of_every_role_once(running: Any) -> None:
    running.new_controller()
    running.end("demo-inference-0", exit_code=137)
    await running.settle()
    await running.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    for _ in range(3):
        await running.advance(30)
    status = running.run().status
    for role in ROLES:
        assert {labels(pod)["etude.dev/attempt"] for pod in running.pods(role)} == {"1"}, role
    assert (status.attempt, status.restarts.total) == (1, 1)
    assert dict(status.restarts.by_role) == dict.fromkeys(ROLES, 1)
    assert status.intent is None


@ruled(rule("bad-data", "FailRun", role="trainer", exitCodes={"values": [3]}))
async def test_fail_run_says_which_rule_ended_the_run(running: Any) -> None:
    running.end("demo-trainer-0", exit_code=3)
    await running.settle()
    assert running.condition("Failed") == ("True", "FailureRule")
    message = next(c.message for c in running.run().status.conditions if c.type == "Failed")
    assert "demo-trainer-0 ended with exit code 3" in message
    assert "bad-data" in message


@ruled(rule("patience", "Ignore", role="rewards"))
async def test_an_ignored_failure_stays_the_kubelets(running: Any) -> None:
    running.end("demo-rewards-0", exit_code=78, restarts=9)
    await running.settle()
    assert running.run().status.restarts.total == 0
    assert running.condition("Failed")[0] == "False"


SPOT = rule(
    "spot", "CheckpointAndSuspend", cause="PodCondition", podConditions=["DisruptionTarget"]
)


async def disrupt(lab: Any, pod: str) -> None:
    status = {
        "phase": "Running",
        "conditions": [
            {"type": "Ready", "status": "True"},
            {"type": "DisruptionTarget", "status": "True", "message": "spot node goes"},
        ],
    }
    lab.cluster.set_status(Ref("Pod", "lab", pod), status)
    await lab.settle()


@ruled(SPOT)
async def test_a_run_that_a_rule_suspends_saves_first_and_stays_away(running: Any) -> None:
    await disrupt(running, "demo-inference-0")
    assert running.condition("Suspended") == ("False", "Suspending")
    orders = [order.WhichOneof("what") for order in running.peers.commands]
    assert orders.count("suspend") == 1
    assert running.pods("trainer"), "nothing goes before the checkpoint"
    await running.say(state=run_pb2.RUN_STATE_SUSPENDED, step=5)
    assert running.condition("Suspended") == ("True", "FailureRule")
    assert running.names("Pod") == []
    for _ in range(3):
        await running.advance(600)
    assert running.names("Pod") == []
    assert running.run().spec.suspend is False


class Patient(Kubelet):
    """Pods that are told to go stay until a test takes them away."""

    @override
    def start(self, cluster: MemoryCluster, pod: Manifest) -> None:
        InstantKubelet().start(cluster, pod)

    @override
    def stop(self, cluster: MemoryCluster, pod: Manifest) -> None: ...


async def drain(lab: Any, pod: str) -> None:
    """The condition and the deletion come at once; the pod saves, for some minutes."""
    lab.cluster.kubelet = Patient()
    conditions = [
        {"type": "Ready", "status": "True"},
        {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"},
    ]
    lab.cluster.set_status(Ref("Pod", "lab", pod), {"phase": "Running", "conditions": conditions})
    lab.cluster.remove(Ref("Pod", "lab", pod), grace_s=630)
    await lab.settle()


async def end_drained(lab: Any) -> None:
    lab.cluster.kubelet = InstantKubelet()
    for key, live in lab.cluster.objects().items():
        if key.kind == "Pod" and is_deleting(live):
            lab.cluster.purge(key)
    await lab.settle()


@pytest.mark.parametrize("pod", ["demo-trainer-0", "demo-inference-0"])
@ruled(SPOT)
async def test_a_rule_about_disruption_hears_of_a_pod_that_is_drained_away_once(
    running: Any, run_body: Build, pod: str
) -> None:
    await drain(running, pod)
    for _ in range(3):
        await running.advance(30)
    assert running.condition("Suspended") == ("False", "Suspending")
    await running.say(state=run_pb2.RUN_STATE_SUSPENDED, step=5)
    await end_drained(running)
    assert running.condition("Suspended") == ("True", "FailureRule")
    assert running.names("Pod") == []
    status = running.run().status
    assert (status.restarts.infra, status.restarts.total) == (1, 0)
    running.new_controller()
    ordered = run_body(failurePolicy={"rules": [SPOT]})
    ordered["metadata"]["annotations"] = {"etude.dev/resume": status.hold.since}
    running.cluster.upsert(ordered)
    await running.settle()
    await running.say(state=run_pb2.RUN_STATE_RUNNING, step=6)
    await running.advance(30)
    assert running.condition("Suspended") == ("False", "NotSuspended")
    assert len(running.pods("trainer")) == 1


@ruled({**SPOT, "action": "RestartRole"})
async def test_a_role_restarts_once_however_long_its_drained_pod_stays(running: Any) -> None:
    await drain(running, "demo-inference-0")
    for _ in range(3):
        await running.kill()
        await running.advance(30)
    await end_drained(running)
    await running.advance(30)
    restarts = running.run().status.restarts
    assert (restarts.total, dict(restarts.by_role)) == (1, {"inference": 1})
    assert {labels(pod)["etude.dev/attempt"] for pod in running.pods("inference")} == {"1"}


@ruled(SPOT)
async def test_to_suspend_and_resume_by_hand_ends_what_a_rule_began(
    running: Any, run_body: Build
) -> None:
    await disrupt(running, "demo-inference-0")
    await running.say(state=run_pb2.RUN_STATE_SUSPENDED, step=5)
    running.new_controller()
    for suspend in (True, False):
        running.cluster.upsert(run_body(failurePolicy={"rules": [SPOT]}, suspend=suspend))
        await running.settle()
    assert running.run().status.hold is None
    assert len(running.pods("trainer")) == 1
    assert running.condition("Suspended") == ("False", "NotSuspended")


STALL = {"stepProgressSeconds": 60}


@pytest.mark.parametrize(
    ("action", "restarts"), [("Ignore", 0), ("RestartRole", 1), ("RestartRun", 1)]
)
async def test_a_rule_says_what_a_stalled_run_is_worth(
    lab: Any, run_body: Build, action: str, restarts: int
) -> None:
    rules = [rule("stalls", action, cause="Stalled")]
    lab.cluster.upsert(run_body(failurePolicy={"rules": rules}, deadlines=STALL))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await lab.advance(61)
    assert lab.run().status.restarts.total == restarts
    if not restarts:
        assert lab.condition("Stalled") == ("True", "NoProgress")


async def test_a_rule_may_end_a_run_that_stalls(lab: Any, run_body: Build) -> None:
    rules = [rule("stalls", "FailRun", cause="Stalled")]
    lab.cluster.upsert(run_body(failurePolicy={"rules": rules}, deadlines=STALL))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await lab.advance(61)
    assert lab.condition("Failed") == ("True", "FailureRule")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"cause": "Stalled", "exitCodes": {"values": [1]}},
            "only a rule of cause Exit has exitCodes",
        ),
        ({"cause": "PodCondition"}, "needs podConditions"),
        ({"cause": "Exit", "podConditions": ["Ready"]}, "needs podConditions"),
        ({"cause": "Stalled", "role": "trainer"}, "has no role"),
    ],
)
def test_a_rule_that_could_not_mean_anything_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        FailureRule.model_validate({"name": "r", "action": "Ignore", **fields})


@ruled(SPOT)
async def test_an_annotation_overrules_the_hold_that_it_names_and_no_later_one(
    running: Any, run_body: Build
) -> None:
    await disrupt(running, "demo-inference-0")
    await running.say(state=run_pb2.RUN_STATE_SUSPENDED, step=5)
    running.new_controller()
    ordered = run_body(failurePolicy={"rules": [SPOT]})
    ordered["metadata"]["annotations"] = {"etude.dev/resume": "2020-01-01T00:00:00Z"}
    running.cluster.upsert(ordered)
    await running.settle()
    assert running.names("Pod") == []
    since = running.run().status.hold.since
    ordered["metadata"]["annotations"] = {"etude.dev/resume": since}
    running.cluster.upsert(ordered)
    await running.settle()
    assert running.run().status.hold is None
    assert len(running.pods("trainer")) == 1
    told = [event["note"] for event in running.cluster.events if event["reason"] == "HoldEnded"]
    assert told == [f"the run may continue: the hold FailureRule of {since} has ended"]
    await running.say(state=run_pb2.RUN_STATE_RUNNING, step=6)
    await running.advance(60)
    await disrupt(running, "demo-inference-0")
    await running.say(state=run_pb2.RUN_STATE_SUSPENDED, step=6)
    assert running.names("Pod") == []
