"""Checkpoint Jobs whose pods do not start: reported, and blocking no others."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from typing_extensions import override

from etude.common.api.kinds import Checkpoint
from etude.operator.checkpoints.decide import SLOT_POLL_S
from etude.operator.checkpoints.job_slots import MAX_JOBS, UNSCHEDULABLE_S
from etude.operator.kube.interface import ClusterError
from etude.operator.kube.memory_cluster import InstantKubelet, MemoryCluster
from etude.operator.manifests import Manifest, Ref, ref
from etude.v1 import run_pb2

WAITING = {
    "phase": "Pending",
    "containerStatuses": [
        {
            "name": "main",
            "state": {
                "waiting": {
                    "reason": "CreateContainerConfigError",
                    "message": 'secret "s3" not found',
                }
            },
        }
    ],
}
UNPLACED = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes: no room"}],
}


@pytest.fixture
async def running(lab: Any, run_body: Any) -> Any:
    lab.cluster.upsert(run_body(checkpointing={"keepLast": 20}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    return lab


def found(lab: Any) -> dict[int, Checkpoint]:
    objects = lab.cluster.objects().items()
    made = [Checkpoint.model_validate(m) for key, m in objects if key.kind == "Checkpoint"]
    return {each.saved_state.step: each for each in made}


def stick(lab: Any, status: dict[str, Any]) -> None:
    for pod in lab.pods("janitor"):
        lab.cluster.set_status(Ref("Pod", "lab", pod["metadata"]["name"]), status)


def words(checkpoint: Checkpoint) -> tuple[str, str]:
    (ready,) = [c for c in checkpoint.status.conditions if c.type == "Ready"]
    return ready.reason, ready.message


@pytest.mark.parametrize(
    ("status", "wait_s"),
    [(WAITING, SLOT_POLL_S), (UNPLACED, UNSCHEDULABLE_S + SLOT_POLL_S)],
    ids=["misconfigured", "unplaced"],
)
async def test_jobs_that_cannot_start_keep_no_other_checkpoint_waiting(
    running: Any, status: dict[str, Any], wait_s: float
) -> None:
    for step in range(1, MAX_JOBS + 2):
        await running.tell_checkpoint(step)
    assert len(running.names("Job")) == MAX_JOBS
    stuck = {pod["metadata"]["name"] for pod in running.pods("janitor")}
    stick(running, status)
    await running.advance(wait_s)
    (fresh,) = {pod["metadata"]["name"] for pod in running.pods("janitor")} - stuck
    running.end(fresh, exit_code=0, restarts=0)
    await running.settle()
    phases = [each.status.phase for each in found(running).values()]
    assert sorted(phases) == [*["Ready"], *MAX_JOBS * ["Verifying"]]


@pytest.mark.parametrize(
    ("status", "said"), [(WAITING, 'secret "s3" not found'), (UNPLACED, "0/3 nodes: no room")]
)
async def test_a_checkpoint_that_is_not_read_back_says_what_its_job_waits_for(
    running: Any, status: dict[str, Any], said: str
) -> None:
    await running.tell_checkpoint(1)
    stick(running, status)
    await running.settle()
    assert said in words(found(running)[1])[1]


async def test_a_job_that_a_queue_has_seized_is_named(running: Any) -> None:
    """Kueue gives Jobs without a queue to the LocalQueue `default`, and suspends them."""
    await running.tell_checkpoint(1)
    (name,) = running.names("Job")
    key = Ref("Job", "lab", name)
    job = running.cluster.objects()[key]
    job["metadata"]["labels"] |= {"kueue.x-k8s.io/queue-name": "default"}
    running.cluster.upsert({**job, "spec": {**job["spec"], "suspend": True}})
    await running.settle()
    assert words(found(running)[1])[1].startswith(f"LocalQueue default has suspended Job {name}")


def imported(number: int) -> Manifest:
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {"name": f"imported-{number:02d}", "namespace": "lab"},
        "spec": {
            "reason": "Imported",
            "source": {"uri": f"s3://old/{number}", "manifestDigest": f"{number:064x}"},
            "storage": {"uri": "s3://old"},
            "deletionPolicy": "Retain",
        },
    }


def put(lab: Any, count: int) -> list[Ref]:
    """So many checkpoints at once; none was looked at yet."""
    return [ref(lab.cluster.upsert(imported(number))) for number in range(count)]


def slowed(monkeypatch: pytest.MonkeyPatch, failures: int = 0) -> None:
    """The API server takes its time to make an object; the first few it does not make."""
    apply = MemoryCluster.apply
    left = [None] * failures

    async def slow(self: Any, manifest: Manifest, *, manager: str) -> Any:
        for _ in range(10):
            await asyncio.sleep(0)
        if left:
            left.pop()
            raise ClusterError("etcd is busy")
        return await apply(self, manifest, manager=manager)

    monkeypatch.setattr(MemoryCluster, "apply", slow)


async def test_passes_at_one_time_do_not_take_the_same_place(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch)
    await asyncio.gather(*(lab.reconciler.reconcile(key) for key in put(lab, 24)))
    assert len(lab.names("Job")) == MAX_JOBS


async def test_a_job_that_could_not_be_made_gives_its_place_back(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch, failures=MAX_JOBS)
    keys = put(lab, 24)
    passes = (lab.reconciler.reconcile(key) for key in keys)
    failed = [e for e in await asyncio.gather(*passes, return_exceptions=True) if e is not None]
    assert sum(isinstance(each, ClusterError) for each in failed) == MAX_JOBS
    assert lab.names("Job") == []
    await asyncio.gather(*(lab.reconciler.reconcile(key) for key in keys))
    assert len(lab.names("Job")) == MAX_JOBS


@dataclass
class Full(InstantKubelet):
    """A cluster that has a machine for some pods alone."""

    fitting: str = "none"
    """What the names of those begin with."""
    asked: set[str] = field(default_factory=set)
    """The others that asked for one."""

    @override
    def start(self, cluster: MemoryCluster, pod: Manifest) -> None:
        if ref(pod).name.startswith(self.fitting):
            super().start(cluster, pod)
        else:
            self.asked.add(ref(pod).name)
            cluster.set_status(ref(pod), UNPLACED)


async def test_a_full_cluster_gets_no_job_for_each_checkpoint_and_each_has_its_turn(
    lab: Any,
) -> None:
    full = lab.cluster.kubelet = Full()
    put(lab, 3 * MAX_JOBS)
    await lab.settle()
    assert len(lab.names("Job")) == MAX_JOBS
    for _ in range(400):
        await lab.advance(SLOT_POLL_S)
        assert len(lab.names("Job")) <= MAX_JOBS
    assert len(full.asked) == 3 * MAX_JOBS


async def test_one_that_fits_is_read_back_beside_any_number_that_do_not(lab: Any) -> None:
    lab.cluster.kubelet = Full("imported-11")
    put(lab, 11)
    await lab.settle()
    lab.cluster.upsert(imported(11))
    await lab.settle()
    for _ in range(60):
        await lab.advance(SLOT_POLL_S)
        for pod in lab.pods("janitor"):
            if ref(pod).name.startswith("imported-11"):
                lab.end(ref(pod).name, exit_code=0, restarts=0)
        await lab.settle()
    key = Ref("Checkpoint", "lab", "imported-11")
    assert lab.cluster.objects()[key]["status"]["phase"] == "Ready"


async def test_nobody_gives_up_a_place_that_nobody_waits_for(lab: Any) -> None:
    lab.cluster.kubelet = Full()
    put(lab, MAX_JOBS)
    await lab.settle()
    before = lab.writes.copy()
    await lab.advance(10 * UNSCHEDULABLE_S)
    assert [each for each in lab.writes[len(before) :] if "Job" in each] == []


async def test_a_deletion_that_does_not_begin_says_why(running: Any) -> None:
    await running.tell_checkpoint(1)
    await running.finish_jobs()
    running.cluster.remove(Ref("Checkpoint", "lab", found(running)[1].metadata.name))
    await running.settle()
    stick(running, WAITING)
    await running.settle()
    reason, message = words(found(running)[1])
    assert (reason, found(running)[1].status.phase) == ("Deleting", "Deleting")
    assert 'secret "s3" not found' in message
