"""Runs that wait for quota by a Workload: nothing before it is admitted, a checkpoint before it is
given back."""

from dataclasses import replace
from typing import Any

import pytest

from etude.operator.builders.platform import Platform
from etude.operator.manifests import Ref, condition, is_true, ref
from etude.v1 import run_pb2

WORKLOAD = Ref("Workload", "lab", "demo")
QUEUED = {"admission": "Workload", "queueName": "research", "idleRoles": "Hold"}
KINDS = frozenset({"Workload", "ResourceFlavor", "WorkloadPriorityClass", "PriorityClass"})
ROLES = ("trainer", "inference", "rewards")


@pytest.fixture
def platform(platform: Platform) -> Platform:
    return replace(platform, integrations=frozenset({"kueue"}))


@pytest.fixture
def queue(lab: Any) -> "Queue":
    lab.cluster.integrations = KINDS
    return Queue(lab)


class Queue:
    """Says of the run's Workload what Kueue would."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab

    async def says(
        self,
        *,
        admission: dict[str, Any] | None,
        checks: tuple[Any, ...] = (),
        **facts: tuple[str, str],
    ) -> None:
        known = {c["type"]: c for c in self.status().get("conditions", ())}
        for kind, (status, reason) in facts.items():
            when = {"lastTransitionTime": "2026-01-01T00:00:00Z", "message": "by the test"}
            known[kind] = {"type": kind, "status": status, "reason": reason, **when}
        given = {} if admission is None else {"admission": admission}
        said: dict[str, Any] = {"admissionChecks": list(checks)} if checks else {}
        self.lab.cluster.set_status(WORKLOAD, {"conditions": list(known.values()), **given, **said})
        await self.lab.settle()

    async def admits(self, flavor: str = "h200", *, checks: tuple[Any, ...] = ()) -> None:
        sets = [{"name": role, "flavors": {"nvidia.com/gpu": flavor}} for role in ROLES]
        await self.says(
            admission={"clusterQueue": "all", "podSetAssignments": sets},
            checks=checks,
            QuotaReserved=("True", "QuotaReserved"),
            Admitted=("True", "Admitted"),
            Evicted=("False", "QuotaReserved"),
        )

    async def evicts(self, reason: str = "Preempted") -> None:
        await self.says(admission=self.status()["admission"], Evicted=("True", reason))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.lab.cluster.objects()[WORKLOAD].get("status", {})
        return found

    def flavor(self, name: str = "h200", **spec: Any) -> None:
        metadata = {"name": name, "namespace": "default"}
        self.lab.cluster.upsert({"kind": "ResourceFlavor", "metadata": metadata, "spec": spec})


def pods_of(lab: Any) -> list[str]:
    return [name for name in lab.names("Pod") if "node" not in name and "broker" not in name]


def phase(lab: Any) -> str:
    text: str = lab.run().status.phase
    return text


async def admitted(lab: Any, queue: Queue, run_body: Any) -> None:
    queue.flavor(nodeLabels={"gpu": "h200"}, tolerations=[{"key": "gpu", "operator": "Exists"}])
    lab.cluster.upsert(run_body(scheduling=QUEUED))
    await lab.settle()
    await queue.admits()


async def test_a_queued_run_has_a_workload_and_no_pod(
    lab: Any, queue: Queue, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(scheduling=QUEUED))
    await lab.settle()
    spec = lab.cluster.objects()[WORKLOAD]["spec"]
    assert spec["queueName"] == "research"
    assert [(s["name"], s["count"]) for s in spec["podSets"]] == [
        ("trainer", 1),
        ("inference", 2),
        ("rewards", 1),
    ]
    assert pods_of(lab) == []
    assert phase(lab) == "Queued"
    assert lab.condition("QuotaReserved") == ("False", "WaitingForQuota")
    assert lab.run().status.active.since is None
    assert queue.status() == {}


async def test_an_admitted_run_runs_where_the_queue_says(
    lab: Any, queue: Queue, run_body: Any
) -> None:
    await admitted(lab, queue, run_body)
    assert len(pods_of(lab)) == 4
    for role in ROLES:
        for pod in lab.pods(role):
            assert pod["spec"]["nodeSelector"] == {"gpu": "h200"}
            assert pod["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert lab.condition("QuotaReserved") == ("True", "QuotaReserved")
    assert lab.run().status.active.since is not None
    ready = condition(lab.cluster.objects()[WORKLOAD], "PodsReady")
    assert (ready["status"], ready["reason"]) == ("True", "Started")


async def test_a_flavor_that_is_not_there_is_named_and_waited_for(
    lab: Any, queue: Queue, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(scheduling=QUEUED))
    await lab.settle()
    await queue.admits()
    assert lab.condition("QuotaReserved") == ("False", "Inadmissible")
    assert pods_of(lab) == []
    queue.flavor(nodeLabels={})
    await lab.advance(30)
    assert len(pods_of(lab)) == 4


def check(role: str, **said: Any) -> dict[str, Any]:
    updates = [{"name": role, **said}]
    return {"name": "capacity", "state": "Ready", "podSetUpdates": updates}


async def test_pods_go_to_the_capacity_that_an_admission_check_made_for_them(
    lab: Any, queue: Queue, run_body: Any
) -> None:
    """As ProvisioningRequests do."""
    queue.flavor(nodeLabels={"gpu": "h200"})
    lab.cluster.upsert(run_body(scheduling=QUEUED))
    await lab.settle()
    note = {"autoscaling.x-k8s.io/consume-provisioning-request": "demo-1"}
    made = check(
        "trainer",
        annotations=note,
        labels={"etude.dev/role": "other", "made-for": "demo"},
        nodeSelector={"pool": "dws"},
        tolerations=[{"key": "dws", "operator": "Exists"}],
    )
    await queue.admits(checks=(made,))
    (trainer,) = lab.pods("trainer")
    assert note.items() <= trainer["metadata"]["annotations"].items()
    assert trainer["metadata"]["labels"]["made-for"] == "demo"
    assert trainer["spec"]["nodeSelector"] == {"gpu": "h200", "pool": "dws"}
    assert trainer["spec"]["tolerations"] == [{"key": "dws", "operator": "Exists"}]
    assert lab.pods("rewards")[0]["spec"]["nodeSelector"] == {"gpu": "h200"}


async def test_an_admission_check_that_contradicts_a_flavor_is_named(
    lab: Any, queue: Queue, run_body: Any
) -> None:
    queue.flavor(nodeLabels={"gpu": "h200"})
    lab.cluster.upsert(run_body(scheduling=QUEUED))
    await lab.settle()
    await queue.admits(checks=(check("trainer", nodeSelector={"gpu": "h100"}),))
    found = next(c for c in lab.run().status.conditions if c.type == "QuotaReserved")
    assert (found.status, found.reason) == ("False", "Inadmissible")
    assert found.message == "an admission check contradicts the flavor's gpu for role trainer"
    assert pods_of(lab) == []


async def test_an_evicted_run_saves_before_its_pods_and_then_its_quota_go(
    lab: Any, queue: Queue, run_body: Any
) -> None:
    await admitted(lab, queue, run_body)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await queue.evicts()
    assert phase(lab) == "Suspending"
    (order,) = filter(is_end, lab.peers.commands)
    assert order.suspend.checkpoint
    assert len(pods_of(lab)) == 4, "nothing is saved yet"
    assert is_true(lab.cluster.objects()[WORKLOAD], "QuotaReserved")
    await lab.tell_checkpoint(1)
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=1)
    await lab.finish_jobs()
    await lab.advance(5)
    assert pods_of(lab) == []
    workload = lab.cluster.objects()[WORKLOAD]
    assert not is_true(workload, "QuotaReserved")
    assert not is_true(workload, "Admitted")
    assert is_true(workload, "Requeued"), "a preempted run waits for its turn at once"
    assert "admission" not in workload["status"]
    assert pods_ready(lab) == ("False", "WaitForStart"), "the next admission's pods are others"
    assert (phase(lab), lab.condition("QuotaReserved")) == ("Queued", ("False", "Evicted"))
    assert lab.run().status.active.since is None
    lab.new_controller()
    await queue.admits()
    assert len(pods_of(lab)) == 4
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    assert phase(lab) == "Running"


async def test_an_evicted_run_waits_for_the_checkpoint_that_it_was_told_of_meanwhile(
    lab: Any, queue: Queue, run_body: Any
) -> None:
    await admitted(lab, queue, run_body)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await lab.tell_checkpoint(1)
    await lab.finish_jobs()
    (saved,) = lab.names("Checkpoint")
    lab.cluster.upsert(run_body(scheduling=QUEUED, checkpointing=put_back("misspelt")))
    await lab.settle()
    assert lab.condition("Accepted")[0] == "True", "it has pods, and goes on"
    await queue.evicts()
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=1)
    await lab.advance(5)
    assert pods_of(lab) == []
    assert lab.condition("Accepted") == ("False", "CheckpointNotReady")
    lab.cluster.upsert(run_body(scheduling=QUEUED, checkpointing=put_back(saved)))
    await lab.settle()
    assert lab.condition("Accepted")[0] == "True"
    resumption = lab.run().status.resumption
    assert (resumption.number, resumption.name) == (1, saved)


def put_back(name: str) -> dict[str, Any]:
    return {"resume": "Named", "resumeFrom": {"name": name}}


def pods_ready(lab: Any) -> tuple[str, str]:
    said = condition(lab.cluster.objects()[WORKLOAD], "PodsReady")
    return said["status"], said["reason"]


@pytest.mark.parametrize("before", [("True", "Started"), ("False", "WaitForRecovery")])
async def test_pods_of_an_earlier_admission_are_forgotten_before_the_next(
    lab: Any, queue: Queue, run_body: Any, before: tuple[str, str]
) -> None:
    """Kueue evicts a run that waits for recovery for too long; its time in the queue is none."""
    lab.cluster.upsert(run_body(scheduling=QUEUED))
    await lab.settle()
    await queue.says(
        admission=None,
        PodsReady=before,
        QuotaReserved=("False", "Pending"),
        Admitted=("False", "NoReservation"),
    )
    assert pods_ready(lab) == ("False", "WaitForStart")
    await queue.admits("no-such-flavor")
    assert pods_ready(lab) == ("False", "WaitForStart")


async def test_pods_that_were_lost_are_waited_for_as_recovery(
    lab: Any, queue: Queue, run_body: Any
) -> None:
    await admitted(lab, queue, run_body)
    (trainer,) = lab.pods("trainer")
    lab.cluster.set_status(ref(trainer), {"conditions": [{"type": "Ready", "status": "False"}]})
    await lab.settle()
    assert pods_ready(lab) == ("False", "WaitForRecovery")
    lab.cluster.set_status(ref(trainer), trainer["status"])
    await lab.settle()
    assert pods_ready(lab) == ("True", "Recovered")


def is_end(request: run_pb2.CommandRequest) -> bool:
    return request.HasField("suspend")


async def test_a_run_whose_quota_is_gone_all_at_once_saves_too(
    lab: Any, queue: Queue, run_body: Any
) -> None:
    await admitted(lab, queue, run_body)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    lab.cluster.remove(WORKLOAD)
    await lab.settle()
    assert phase(lab) == "Suspending"
    assert len(pods_of(lab)) == 4


async def test_an_eviction_before_the_first_pod_is_answered_at_once(
    lab: Any, queue: Queue, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(scheduling=QUEUED))
    await lab.settle()
    await queue.admits()  # without its flavor no pod comes
    await queue.evicts("PodsReadyTimeout")
    workload = lab.cluster.objects()[WORKLOAD]
    assert not is_true(workload, "QuotaReserved")
    requeued = condition(workload, "Requeued")
    assert (requeued["status"], requeued["reason"]) == ("False", "PodsReadyTimeout")


async def test_a_suspended_run_gives_its_quota_back_when_its_pods_are_gone(
    lab: Any, queue: Queue, run_body: Any
) -> None:
    await admitted(lab, queue, run_body)
    lab.cluster.upsert(run_body(scheduling=QUEUED, suspend=True))
    await lab.settle()
    await lab.advance(60)
    assert lab.condition("Suspended") == ("True", "ByUser")
    assert WORKLOAD not in lab.cluster.objects()
    lab.cluster.upsert(run_body(scheduling={**QUEUED, "queueName": "other"}, suspend=False))
    await lab.settle()
    assert lab.cluster.objects()[WORKLOAD]["spec"]["queueName"] == "other"
    assert phase(lab) == "Queued"


async def test_a_finished_run_says_so_to_its_queue(lab: Any, queue: Queue, run_body: Any) -> None:
    await admitted(lab, queue, run_body)
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=40)
    await lab.advance(700)
    assert lab.condition("Complete")[0] == "True"
    finished = condition(lab.cluster.objects()[WORKLOAD], "Finished")
    assert (finished["status"], finished["reason"]) == ("True", "Succeeded")


async def test_a_run_that_asks_for_a_queue_is_refused_without_one_and_taken_once_it_is_there(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(scheduling=QUEUED))
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "KueueNotInstalled")
    assert lab.names("Workload") == lab.names("StatefulSet") == []
    lab.cluster.integrations = KINDS
    await lab.advance(30)
    assert lab.condition("Accepted") == ("True", "Accepted")
    assert lab.names("Workload") == ["demo"]


async def test_a_steady_queue_costs_no_write(lab: Any, queue: Queue, run_body: Any) -> None:
    await admitted(lab, queue, run_body)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await lab.advance(10)
    before = len(lab.writes)
    for _ in range(12):
        lab.dirty[Ref("RLRun", "lab", "demo")] = None
        await lab.advance(5)
    assert lab.writes[before:] == []


async def test_an_api_that_is_taken_away_under_a_run_leaves_its_pods_alone(
    lab: Any, queue: Queue, run_body: Any
) -> None:
    await admitted(lab, queue, run_body)
    lab.cluster.integrations = frozenset()
    lab.dirty[Ref("RLRun", "lab", "demo")] = None
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "KueueNotInstalled")
    assert len(pods_of(lab)) == 4
    lab.cluster.integrations = KINDS
    await lab.advance(30)
    assert lab.condition("Accepted") == ("True", "Accepted")
