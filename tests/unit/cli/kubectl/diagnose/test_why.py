"""Why a run does not progress: the first cause, in words that somebody can act on."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.kube import observed_runs
from tests.support.kube.observed_runs import (
    before,
    checkpoint,
    condition,
    ended,
    event,
    pod,
    pool,
    run,
    seen,
    waiting,
)

from etude.cli.kubectl.diagnose.diagnosis import Diagnosis, RunState
from etude.cli.kubectl.diagnose.run_objects import RunObjects
from etude.cli.kubectl.diagnose.why import diagnose
from etude.common.errors import UserError

WAITS = condition("Progressing", "False", "WaitingForRoles", "trainer not ready")


def why(what: RunObjects) -> Diagnosis:
    return diagnose(what, observed_runs.NOW)


def of_pod(unready: observed_runs.Manifest, *events: observed_runs.Manifest) -> Diagnosis:
    return why(seen(run(WAITS), unready, events=events))


def told(found: Diagnosis) -> str:
    return "\n".join(found.lines())


def test_a_run_whose_steps_finish_progresses_and_needs_nothing() -> None:
    found = why(seen(run(), pod()))
    assert (found.state, found.reason, found.do) == (RunState.PROGRESSES, "StepsFinish", "")
    assert "the last step, 12/60, finished 10 s ago" in told(found)


def test_the_schedulers_words_stand_beside_what_the_pod_asks_for() -> None:
    words = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    container = {"name": "trainer", "resources": {"requests": {"nvidia.com/gpu": "8"}}}
    unready = pod(
        ready=False,
        conditions=[condition("PodScheduled", "False", "Unschedulable", words)],
        nodeSelector={"pool": "h200"},
        containers=[container],
    )
    found = of_pod(unready)
    assert found.sentence == (
        "demo does not progress: no node takes demo-trainer-0  [Unschedulable]"
    )
    assert found.evidence == (
        f"scheduler: {words}",
        "it wants a node with label pool=h200",
        "it asks for 8 nvidia.com/gpu",
    )


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("manifest for x:1: not found", "no such image"),
        ("pull access denied, 403 Forbidden", "imagePullSecrets"),
        ("dial tcp: lookup x: no such host", "does not reach the registry"),
    ],
)
def test_what_helps_a_pull_depends_on_the_registrys_words(words: str, fix: str) -> None:
    unready = pod(ready=False, container=waiting("ImagePullBackOff", "Back-off pulling"))
    pulled = event(unready, "Failed", f'Failed to pull image "x:1": {words}', 20)
    noise = event(unready, "Failed", "Error: ImagePullBackOff", 1)
    found = of_pod(unready, pulled, noise)
    assert found.reason == "ImagePullFailed"
    assert words in told(found)
    assert fix in found.do


def test_a_crash_is_told_with_its_exit_code_what_that_means_and_its_last_line() -> None:
    last = {"lastState": ended(137, "loading\nallocating 80 GiB\n", "OOMKilled")}
    crashed = pod(ready=False, container={**waiting("CrashLoopBackOff"), "restartCount": 4, **last})
    found = of_pod(crashed)
    assert found.cause == "demo-trainer-0 ended with exit code 137 (out of memory), 4 restarts"
    assert found.evidence == ("its last line: allocating 80 GiB",)
    assert "kubectl etude logs demo --previous" in found.do


@pytest.mark.parametrize(
    "error",
    ["StoreError", "StoreRefusedError", "RefusedError", "DeniedError", "NoBucketError"],
)
def test_a_crash_for_the_object_store_is_the_object_stores_trouble(error: str) -> None:
    words = f"etude-trainer: {error}: s3://runs/demo: create: 403 AccessDenied"
    crashed = pod(
        ready=False, container={**waiting("CrashLoopBackOff"), "lastState": ended(1, words)}
    )
    found = of_pod(crashed)
    assert found.reason == "StorageUnavailable"
    assert "403 AccessDenied" in told(found)
    assert "etude storage check" in found.do


def test_a_role_that_is_started_anew_over_and_over_is_no_mere_start() -> None:
    failure = {
        "time": before(30),
        "role": "trainer",
        "pod": "demo-trainer-0",
        "reason": "Error",
        "exitCode": 78,
        "message": "spec.phases[0]: unknown\n",
    }
    degraded = condition("Degraded", "True", "RoleFailed", "demo-trainer-0: it ended")
    status: observed_runs.Manifest = {
        "lastFailure": failure,
        "restarts": {"total": 2, "counted": 2},
    }
    found = why(seen(run(WAITS, degraded, **status), pod(ready=False)))
    assert found.state is RunState.STANDS_STILL
    assert found.cause == (
        "demo-trainer-0 ended with exit code 78 (it refuses its configuration), restart 2 of 3"
    )
    assert found.evidence == ("its last line: spec.phases[0]: unknown", "it ended 30 s ago")


def test_the_sentence_stays_the_same_while_nothing_changes() -> None:
    waiting_for_it = seen(run(WAITS, lastStepTime=before(400)), pod(ready=False))
    later = observed_runs.NOW + timedelta(seconds=7)
    assert diagnose(waiting_for_it, later).sentence == why(waiting_for_it).sentence


def test_a_pod_on_its_way_out_holds_the_place_of_its_successor() -> None:
    going = pod(ready=False)
    going["metadata"]["deletionTimestamp"] = before(-240)
    waits = condition("RolesReady", "False", "PodsNotReady", "trainer not ready")
    found = why(seen(run(WAITS, waits), going))
    assert found.reason == "PodsNotReady"
    assert "demo-trainer-0 is terminating, which may take 4 m 0 s" in found.evidence


def test_a_secret_that_is_not_there_is_to_be_created() -> None:
    lacking = waiting("CreateContainerConfigError", 'secret "s3" not found')
    found = of_pod(pod(ready=False, container=lacking))
    assert found.reason == "CreateContainerConfigError"
    assert found.do == "create the Secret that is named, in the namespace of the pod"


def test_a_volume_that_does_not_come_is_found_in_the_events() -> None:
    unready = pod(ready=False, container=waiting("ContainerCreating"))
    found = of_pod(unready, event(unready, "FailedMount", 'configmap "demo-run" not found'))
    assert found.reason == "FailedMount"
    assert 'configmap "demo-run" not found' in told(found)


def test_a_pod_that_gets_no_certificate_is_told_from_one_that_starts() -> None:
    unready = pod(ready=False, container=waiting("PodInitializing"))
    sidecar = {"name": "certificates", "started": False, "state": {"running": {}}}
    unready["status"]["initContainerStatuses"] = [sidecar]
    found = of_pod(unready)
    assert found.do.startswith("kubectl logs demo-trainer-0 -c certificates")
    sidecar["started"] = True
    assert "certificate" not in told(of_pod(unready))


def test_pods_that_a_quota_keeps_from_being_made_wait_for_quota() -> None:
    workload = {
        "kind": "StatefulSet",
        "metadata": {"name": "demo-trainer", "uid": "set", "labels": {"etude.dev/run": "demo"}},
        "spec": {"replicas": 1},
        "status": {"replicas": 0},
    }
    words = 'create Pod failed: pods "demo-trainer-0" is forbidden: exceeded quota: gpus'
    found = why(seen(run(WAITS), workload, events=[event(workload, "FailedCreate", words)]))
    assert (found.reason, found.state) == ("WaitingForQuota", RunState.WAITS)
    assert words in told(found)


def test_pods_that_a_queue_holds_back_wait_for_quota() -> None:
    gated = pod(
        ready=False,
        conditions=[condition("PodScheduled", "False", "SchedulingGated", "held")],
        schedulingGates=[{"name": "kueue.x-k8s.io/admission"}],
    )
    found = of_pod(gated)
    assert found.reason == "WaitingForQuota"
    assert "kueue.x-k8s.io/admission" in told(found)


def test_a_pod_that_starts_is_waited_for_with_the_probes_words() -> None:
    starting = pod(ready=False)
    found = of_pod(starting, event(starting, "Unhealthy", "Startup probe failed: refused"))
    assert (found.state, found.reason) == (RunState.WAITS, "PodsNotReady")
    assert "Startup probe failed: refused" in told(found)


def test_trouble_of_engines_is_no_cause_before_anything_is_sampled() -> None:
    tuning = run(WAITS)
    tuning["spec"]["phases"] = [{"name": "rl", "type": "SupervisedFineTuning"}]
    broken = pod("inference", ready=False, container=waiting("ErrImagePull", "not found"))
    starting = pod(ready=False)
    found = why(seen(tuning, broken, starting, pool(name="other")))
    assert found.reason == "PodsNotReady"
    assert "demo-trainer-0" in found.cause


def test_what_does_not_pass_by_itself_comes_before_what_does() -> None:
    unavailable = pool(condition("Available", "False", "ScaledToZero", "spec.replicas is 0"))
    found = why(seen(run(WAITS), pod(ready=False), unavailable))
    assert found.reason == "ScaledToZero"
    assert found.do == "kubectl scale envp swe --replicas=N"
    assert "also, demo-trainer-0 is starting" in found.evidence


def test_a_pool_that_is_missing_is_named() -> None:
    waits = condition("Progressing", "False", "WaitingForEnvironments")
    found = why(seen(run(waits), pool(name="other")))
    assert found.cause == "pool swe does not exist in this namespace"


def test_a_pool_that_hands_out_what_it_has_is_no_cause_though_it_may_not_grow() -> None:
    waits = condition("Progressing", "False", "WaitingForEnvironments")
    refused = condition("Accepted", "False", "Refused", "exceeded quota")
    serving = pool(refused, condition("Available", "True", "NodesReady"))
    assert why(seen(run(waits), serving)).reason != "Refused"
    idle = pool(refused, condition("Available", "False", "BrokerNotReady"))
    assert why(seen(run(waits), idle)).reason == "Refused"


def test_a_pool_is_explained_by_its_hosts() -> None:
    waits = condition("Progressing", "False", "WaitingForEnvironments")
    node = pod("node", ready=False, pool="swe", container=waiting("ErrImagePull", "x: not found"))
    warming = pool(condition("Available", "False", "PoolWarming", "no node is ready"))
    found = why(seen(run(waits), pod(), warming, node))
    assert found.reason == "ImagePullFailed"
    assert found.evidence[0] == "pool swe hands out no environments"


def test_hosts_that_refuse_their_driver_say_so() -> None:
    waits = condition("Progressing", "False", "WaitingForEnvironments")
    last = {"lastState": ended(78, "KVM: /dev/kvm is missing")}
    node = pod("node", ready=False, pool="swe", container={**waiting("CrashLoopBackOff"), **last})
    broken = pool(
        condition("Available", "False", "PoolWarming"),
        condition("Degraded", "True", "DriverUnavailable", "swe-node-0: back-off"),
    )
    found = why(seen(run(waits), pod(), broken, node))
    assert found.reason == "DriverUnavailable"
    assert "/dev/kvm is missing" in told(found)


FULL = pool(slots={"idle": 0, "leased": 64, "queued": 7})


def test_a_pool_without_an_idle_slot_is_a_cause_once_nothing_finishes() -> None:
    found = why(seen(run(lastStepTime=before(400)), pod(), FULL))
    assert found.reason == "NoIdleSlot"
    assert "64 leased, none idle, 7 asked for" in found.evidence
    busy = why(seen(run(), pod(), FULL))
    assert busy.state is RunState.PROGRESSES
    assert "also, every environment of pool swe is taken" in busy.evidence


def test_a_silent_step_is_one_that_takes_longer_than_five_minutes() -> None:
    found = why(seen(run(lastStepTime=before(301)), pod()))
    assert (found.reason, found.state) == ("SilentStep", RunState.WAITS)
    assert "kubectl etude stacks demo" in found.do
    saving = why(seen(run(lastStepTime=before(301), phase="Checkpointing"), pod()))
    assert saving.state is RunState.PROGRESSES
    resumed = why(seen(run(lastStepTime=before(3_000), active={"since": before(60)}), pod()))
    assert resumed.state is RunState.PROGRESSES


def test_a_step_is_not_silent_where_steps_always_take_so_long() -> None:
    slow = [checkpoint(12, 0), checkpoint(6, 3_600)]
    assert why(seen(run(lastStepTime=before(1_790)), pod(), *slow)).state is RunState.PROGRESSES
    assert why(seen(run(lastStepTime=before(1_810)), pod(), *slow)).reason == "SilentStep"


def test_a_controller_that_does_not_report_is_asked_for_its_stacks() -> None:
    lost = condition("Progressing", "False", "ControllerUnreachable", "it does not report")
    found = why(seen(run(lost), pod()))
    assert found.reason == "ControllerUnreachable"
    assert "kubectl etude stacks demo --role trainer" in found.do


def test_trouble_with_the_store_beside_finished_steps_is_told_and_no_standstill() -> None:
    words = "s3://runs: 503 SlowDown"
    degraded = condition("Degraded", "True", "StorageUnavailable", words)
    assert why(seen(run(degraded), pod())).state is RunState.PROGRESSES
    found = why(seen(run(degraded, lastStepTime=before(400)), pod()))
    assert (found.state, found.reason) == (RunState.STANDS_STILL, "StorageUnavailable")
    assert words in found.evidence


def test_a_code_that_a_process_made_up_is_passed_on_with_its_words() -> None:
    degraded = condition("Degraded", "True", "SunSpots", "too many")
    found = why(seen(run(degraded), pod()))
    assert (found.reason, found.evidence[0]) == ("SunSpots", "too many")
    assert "kubectl etude logs demo" in found.do


def test_a_run_that_no_operator_looked_at_says_so() -> None:
    fresh = run()
    fresh["status"] = {}
    found = why(seen(fresh))
    assert found.reason == "OperatorSilent"
    changed = run()
    changed["metadata"]["generation"] = 2
    assert "an older spec" in why(seen(changed)).cause


def test_a_run_that_rests_says_where_it_goes_on() -> None:
    saved = {"name": "demo-s00000012-abc", "step": 12, "time": before(60)}
    found = why(seen(run(condition("Suspended", "True", "ByUser"), lastCheckpoint=saved)))
    assert (found.state, found.do) == (RunState.RESTS, "kubectl etude resume demo")
    assert "it goes on after demo-s00000012-abc, step 12" in found.evidence


def test_a_suspension_names_the_checkpoint_that_it_waits_for() -> None:
    intent = {"type": "Suspend", "reason": "ByUser", "since": before(40)}
    suspending = run(condition("Suspended", "False", "Suspending"), intent=intent)
    saved = checkpoint(12)
    saved["status"]["phase"] = "Verifying"
    found = why(seen(suspending, saved, checkpoint(6)))
    assert found.state is RunState.WAITS
    assert found.evidence == ("it began 40 s ago", "demo-s00000012 is Verifying")
    assert why(seen(suspending, checkpoint(12))).evidence == ("it began 40 s ago",)


def test_a_run_that_is_about_to_fail_is_not_said_to_wait() -> None:
    intent = {"type": "Fail", "reason": "RestartsExhausted", "message": "3", "since": before(1)}
    assert why(seen(run(WAITS, intent=intent))).state is RunState.FAILED


def test_a_status_of_another_version_is_an_error_with_its_field() -> None:
    with pytest.raises(UserError, match=r"status\.policyVersion"):
        why(seen(run(policyVersion="newest")))


TYPES = sorted(observed_runs.FINE)
CONDITIONS = st.builds(
    condition,
    st.sampled_from(TYPES),
    st.sampled_from(["True", "False"]),
    st.sampled_from(["Unschedulable", "Loading", "ByUser", "NoProgress", "Made", "PoolWarming"]),
    st.text(max_size=20),
)
PODS = st.builds(
    lambda role, ready, reason: pod(role, ready=ready, container=waiting(reason)),
    st.sampled_from(["trainer", "inference", "rewards"]),
    st.booleans(),
    st.sampled_from(["ErrImagePull", "CrashLoopBackOff", "ContainerCreating", "Unknown"]),
)


@given(st.lists(CONDITIONS, max_size=6), st.lists(PODS, max_size=4))
def test_whatever_is_seen_there_is_an_answer(
    conditions: list[observed_runs.Manifest], pods: list[observed_runs.Manifest]
) -> None:
    found = why(seen(run(*conditions), *pods))
    assert found.cause
    assert found.do or found.state in {RunState.PROGRESSES, RunState.OVER}
    assert found.as_json()["reason"] == found.reason


def test_a_status_of_a_later_operator_is_read_as_far_as_it_is_known() -> None:
    later = run()
    later["status"] |= {"ofTheFuture": 1}
    assert seen(later).status == seen(run()).status
