"""A run as one JobSet, and the status of its pods."""

import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest

from etude.common.api.kinds import RLRun
from etude.operator.builders import run as desired
from etude.operator.builders.jobset import EXIT_NONZERO
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape
from etude.operator.manifests import Manifest, Ref

KINDS = frozenset(
    {"JobSet", "Workload", "ResourceFlavor", "WorkloadPriorityClass", "PriorityClass"}
)
JOBSET = {"workload": "JobSet", "idleRoles": "Hold"}
QUEUED = {
    "admission": "JobSet",
    "queueName": "research",
    "workloadPriorityClassName": "high",
    "idleRoles": "Hold",
}
JOB_SET = Ref("JobSet", "lab", "demo")


@pytest.fixture
def platform(platform: Platform) -> Platform:
    return replace(platform, integrations=frozenset({"jobset", "kueue"}))


def job_set_of(body: Manifest, platform: Platform, **shape: Any) -> Manifest:
    made = desired.run_children(
        RLRun.model_validate(body), RunShape(images=platform.images, **shape), platform
    )
    (found,) = (m for m in made if m["kind"] == "JobSet")
    assert "StatefulSet" not in {m["kind"] for m in made}
    return found


def jobs(job_set: Manifest) -> dict[str, Manifest]:
    return {each["name"]: each["template"] for each in job_set["spec"]["replicatedJobs"]}


def test_each_role_is_a_job_whose_template_is_a_valid_one(
    run_body: Any, platform: Platform
) -> None:
    made = jobs(job_set_of(run_body(scheduling=JOBSET), platform))
    assert {name: job["spec"]["parallelism"] for name, job in made.items()} == {
        "trainer": 1,
        "inference": 2,
        "rewards": 1,
    }
    for name, job in made.items():
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}} | job
        version = kubernetes_validate.latest_version()
        kubernetes_validate.validate(whole, version, strict=True)


def test_engines_are_found_by_the_host_names_of_their_job(
    run_body: Any, platform: Platform
) -> None:
    made = jobs(job_set_of(run_body(scheduling=JOBSET), platform))
    (container,) = made["trainer"]["spec"]["template"]["spec"]["containers"]
    told = {each["name"]: each.get("value") for each in container["env"]}
    assert told["ETUDE_INFERENCE_TARGETS"] == (
        "demo-inference-0-0.demo-inference:7010,demo-inference-0-1.demo-inference:7010"
    )
    assert made["inference"]["spec"]["template"]["spec"]["subdomain"] == "demo-inference"


def test_a_queue_finds_a_suspended_jobset_with_its_labels_and_where_pods_may_be(
    run_body: Any, platform: Platform
) -> None:
    topology = {"preferred": "cloud.example.com/rack"}
    body = run_body(scheduling={**QUEUED, "topology": topology})
    made = job_set_of(body, platform, is_running=False, is_queued=True)
    assert made["spec"]["suspend"]
    labels = made["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    for job in jobs(made).values():
        annotations = job["spec"]["template"]["metadata"]["annotations"]
        wanted = {"kueue.x-k8s.io/podset-preferred-topology": "cloud.example.com/rack"}
        assert wanted.items() <= annotations.items()
        affinity = job["spec"]["template"]["spec"]["affinity"]["podAffinity"]
        (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        assert term["podAffinityTerm"]["topologyKey"] == "cloud.example.com/rack"


async def test_what_the_queue_writes_into_the_jobset_stays(lab: Any, run_body: Any) -> None:
    lab.cluster.integrations = KINDS
    lab.cluster.upsert(run_body(scheduling=QUEUED))
    await lab.settle()
    assert lab.run().status.phase == "Queued"
    made = lab.cluster.objects()[JOB_SET]
    lab.cluster.upsert({**made, "spec": {**made["spec"], "suspend": False}})
    await lab.settle()
    await lab.advance(60)
    assert lab.cluster.objects()[JOB_SET]["spec"]["suspend"] is False
    assert lab.condition("QuotaReserved") == ("True", "QuotaReserved")
    assert [w for w in lab.writes if "JobSet" in w] == ["apply JobSet/demo"]
    lab.cluster.upsert({**made, "spec": {**made["spec"], "suspend": True}})
    await lab.settle()
    assert lab.condition("QuotaReserved") == ("False", "Evicted")
    assert lab.run().status.phase == "Queued"
    assert [w for w in lab.writes if "JobSet" in w] == ["apply JobSet/demo"]


async def test_pods_made_before_a_restart_are_of_the_attempt_before(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.integrations = KINDS
    lab.cluster.upsert(run_body(scheduling=JOBSET))
    await lab.settle()
    pod = trainer_pod(lab, "a")
    await lab.settle()
    lab.end(pod, exit_code=1)
    await lab.settle()
    assert lab.run().status.restarts.total == 1
    assert pod not in lab.names("Pod"), "it was told to go"
    lab.clock.advance(2)
    trainer_pod(lab, "b")
    await lab.advance(60)
    (role,) = (r for r in lab.run().status.roles if r.name == "trainer")
    assert (role.attempt, role.ready) == (1, 1)
    assert lab.run().status.intent is None
    assert lab.run().status.restarts.total == 1


def trainer_pod(lab: Any, suffix: str) -> str:
    """What JobSet's and the Job controller would make."""
    owner = lab.cluster.objects()[JOB_SET]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": child("demo-trainer-0", owner, {}),
        "spec": {"suspend": True, "template": {"metadata": {}, "spec": {"containers": []}}},
        "status": {"conditions": []},
    }
    lab.cluster.upsert(job)
    template = jobs(owner)["trainer"]["spec"]["template"]
    name = f"demo-trainer-0-0-{suffix}"
    made = lab.cluster.objects()[Ref("Job", "lab", "demo-trainer-0")]
    metadata = child(name, made, template["metadata"]["labels"])
    lab.cluster.upsert(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    )
    return name


def child(name: str, owner: Manifest, labels: dict[str, str]) -> Manifest:
    reference = {"uid": owner["metadata"]["uid"], "kind": owner["kind"], "controller": True}
    mine = {"etude.dev/run": "demo", **labels}
    return {"name": name, "namespace": "lab", "labels": mine, "ownerReferences": [reference]}


def ended(program: str, *, told_to_go: bool) -> tuple[int, str]:
    """How a container's command ends, and what it said."""
    words = ("/bin/sh", "-c", EXIT_NONZERO, "trainer", sys.executable, "-c", program)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        if told_to_go:
            process.send_signal(signal.SIGTERM)
        said = process.stdout.read()
        return process.wait(timeout=60), said


SAVES = """
import signal, sys, time
def leave(*_):
    time.sleep(0.2)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True:
    time.sleep(1)
"""


def test_a_role_that_saves_as_it_is_told_to_go_is_no_work_that_is_done() -> None:
    assert ended(SAVES, told_to_go=True) == (143, "saved\n")


@pytest.mark.parametrize("code", [1, 78, 137])
def test_a_failure_keeps_its_exit_code(code: int) -> None:
    program = f"print('up', flush=True); import os; os._exit({code})"
    assert ended(program, told_to_go=False) == (code, "")


def test_what_ends_by_itself_is_started_again() -> None:
    assert ended("print('up', flush=True)", told_to_go=False) == (143, "")
