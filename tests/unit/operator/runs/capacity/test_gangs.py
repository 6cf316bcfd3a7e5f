"""Gang scheduling: PodGroups, scheduler messages and time-outs."""

from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest

from etude.common.api.kinds import RLRun
from etude.operator.builders import run as desired
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape
from etude.operator.manifests import Manifest, Ref

GANG = {"provider": "Volcano"}


@pytest.fixture
def platform(platform: Platform) -> Platform:
    return replace(platform, integrations=frozenset({"volcano", "jobset", "kuberay"}))


def children(body: Manifest, platform: Platform, **shape: Any) -> list[Manifest]:
    run = RLRun.model_validate(body)
    return desired.run_children(run, RunShape(images=platform.images, **shape), platform)


def templates(made: list[Manifest]) -> list[Manifest]:
    """Of every pod that comes of a run."""
    found = [m["spec"]["template"] for m in made if m["kind"] == "StatefulSet"]
    for each in made:
        if each["kind"] == "JobSet":
            jobs = each["spec"]["replicatedJobs"]
            found += [job["template"]["spec"]["template"] for job in jobs]
        if each["kind"] == "RayCluster":
            found.append(each["spec"]["headGroupSpec"]["template"])
    return found


@pytest.mark.parametrize("workload", ["StatefulSet", "JobSet", "RayCluster"])
@pytest.mark.parametrize("scope", ["Run", "PerRole"])
def test_every_pod_is_volcanos_and_in_a_group_that_waits_for_all_of_its_pods(
    run_body: Any, platform: Platform, workload: str, scope: str
) -> None:
    gang = {**GANG, "scope": scope}
    made = children(run_body(scheduling={"workload": workload, "gang": gang}), platform)
    groups = {m["metadata"]["name"]: m["spec"] for m in made if m["kind"] == "PodGroup"}
    joined = []
    for template in templates(made):
        joined.append(template["metadata"]["annotations"]["scheduling.k8s.io/group-name"])
        assert template["spec"]["schedulerName"] == "volcano"
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {**pod["metadata"], "name": "pod"}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    assert set(joined) == set(groups)
    members = {name: spec["minMember"] for name, spec in groups.items()}
    each = {"demo-trainer": 1, "demo-inference": 2, "demo-rewards": 1}
    assert members == ({"demo": 4} if scope == "Run" else each)
    kinds = [m["kind"] for m in made]
    makers = ("StatefulSet", "JobSet", "RayCluster")
    assert kinds.index("PodGroup") < min(kinds.index(kind) for kind in makers if kind in kinds)


def test_engines_that_come_and_go_are_waited_for_as_far_as_they_must_be_there(
    run_body: Any, platform: Platform
) -> None:
    body = run_body(scheduling={"gang": GANG, "priorityClassName": "high"})
    body["spec"]["roles"]["inference"] = {
        "replicas": 4,
        "minReplicas": 2,
        "maxReplicas": 8,
        "autoscaling": {"mode": "StepTime", "targetStepSeconds": 60},
    }
    (group,) = (m for m in children(body, platform) if m["kind"] == "PodGroup")
    assert group["spec"] == {"minMember": 4, "priorityClassName": "high"}


def test_without_a_gang_and_without_pods_there_is_no_group(
    run_body: Any, platform: Platform
) -> None:
    for body, running in ((run_body(), True), (run_body(scheduling={"gang": GANG}), False)):
        made = children(body, platform, is_running=running)
        assert not [m for m in made if m["kind"] == "PodGroup"]
    assert "schedulerName" not in templates(children(run_body(), platform))[0]["spec"]


@pytest.fixture
def scheduled(lab_of: Any, platform: Platform) -> Any:
    """A cluster that Volcano schedules."""
    lab = lab_of()
    lab.platform = platform
    lab.cluster.integrations = frozenset({"PodGroup"})
    lab.start()
    return lab


async def test_a_gang_says_what_it_waits_for_and_when_that_takes_too_long(
    scheduled: Any, run_body: Any
) -> None:
    lab = scheduled
    lab.cluster.upsert(run_body(scheduling={"gang": {**GANG, "timeoutSeconds": 60}}))
    await lab.settle()
    assert lab.condition("PodsScheduled") == ("True", "Scheduled")
    said = [{"type": "Unschedulable", "status": "True", "message": "3/4 tasks unschedulable"}]
    lab.cluster.set_status(Ref("PodGroup", "lab", "demo"), {"conditions": said})
    await lab.settle()
    assert lab.condition("PodsScheduled") == ("False", "Unschedulable")
    await lab.advance(61)
    found = next(c for c in lab.run().status.conditions if c.type == "PodsScheduled")
    assert (found.status, found.reason) == ("False", "GangTimeout")
    assert found.message == "PodGroup demo: 3/4 tasks unschedulable"
    for role in ("trainer", "inference", "rewards"):
        for pod in lab.pods(role):
            lab.cluster.upsert({**pod, "spec": {**pod["spec"], "nodeName": "node-1"}})
    await lab.settle()
    assert lab.condition("PodsScheduled") == ("True", "Scheduled")


async def test_a_refusal_that_is_over_is_not_told_of_a_pod_that_is_replaced(
    scheduled: Any, run_body: Any
) -> None:
    """Volcano writes Scheduled beside a refusal that stays True."""
    lab = scheduled
    lab.cluster.upsert(run_body(scheduling={"gang": GANG}))
    await lab.settle()
    refused = {"type": "Unschedulable", "status": "True", "message": "3/4 tasks unschedulable"}
    refused["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    placed = {"type": "Scheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:01Z"}
    group = Ref("PodGroup", "lab", "demo")
    lab.cluster.set_status(group, {"conditions": [refused, placed]})
    await lab.settle()
    assert lab.condition("PodsScheduled") == ("True", "Scheduled")
    again = {**refused, "lastTransitionTime": "2026-01-01T00:00:02Z"}
    lab.cluster.set_status(group, {"conditions": [again, placed]})
    await lab.settle()
    assert lab.condition("PodsScheduled") == ("False", "Unschedulable")


async def test_a_run_waits_for_volcano_to_be_installed(
    lab_of: Any, run_body: Any, platform: Platform
) -> None:
    lab = lab_of()
    lab.platform = platform
    lab.start()
    lab.cluster.upsert(run_body(scheduling={"gang": GANG}))
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "VolcanoNotInstalled")
    lab.cluster.integrations = frozenset({"PodGroup"})
    await lab.advance(31)
    assert lab.condition("Accepted") == ("True", "Accepted")
    assert lab.names("PodGroup") == ["demo"]
