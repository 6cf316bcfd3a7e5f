"""A run that loses its place in a queue to another one saves first: real trainers on a real node.

Kueue and JobSet are stand-ins (tests/support/kube/controllers); pods, signals and saves are real.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.cut_demo import cut_demo
from tests.support.kube.controllers.client import controllers
from tests.support.kube.controllers.jobset import jobset
from tests.support.kube.controllers.kueue import API, kueue
from tests.support.kube.controllers.objects import is_deleting, is_true
from tests.support.kube.object_histories import History, history

ROOT = Path(__file__).parents[2]
CRDS = ROOT / "tests" / "data" / "crds"
LIMIT_S = 900
"""Two minutes on idle cores, most of it imports; a busy machine gets patience."""
CPU = "200m"
PODS, CHECKPOINTS = "/api/v1/pods", "/apis/etude.dev/v1alpha1/checkpoints"
WORKLOADS = f"/apis/{API}/workloads"

Kubectl = Callable[..., str]
Manifest = dict[str, Any]

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(4 * LIMIT_S),
    pytest.mark.usefixtures("crds", "demo_data", "stand_ins", "operator_pod"),
]


@pytest.fixture(scope="module")
def integrations(kubectl: Kubectl, helm: Kubectl, chart: str) -> Iterator[None]:
    """The chart with its rights to queues, and their CRDs; both are gone afterwards."""
    for name in ("jobset", "kueue"):
        kubectl("apply", "-f", str(CRDS / name))
        kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(CRDS / name))
    upgraded(kubectl, helm, chart, is_on=True)
    yield
    upgraded(kubectl, helm, chart, is_on=False)
    for name in ("jobset", "kueue"):
        kubectl("delete", "-f", str(CRDS / name), "--wait=false")


def upgraded(kubectl: Kubectl, helm: Kubectl, home: str, *, is_on: bool) -> None:
    names = ("kueue", "jobset")
    words = (f"integrations.{name}.enabled={str(is_on).lower()}" for name in names)
    sets = [word for each in words for word in ("--set", each)]
    given = ("--namespace", home, "--reuse-values")
    helm("upgrade", "etude", str(ROOT / "helm" / "etude"), *given, *sets)
    kubectl("-n", home, "scale", "deployment/etude-operator", "--replicas=0")


@pytest.fixture
def stand_ins(cluster: Mapping[str, Any], integrations: None) -> Iterator[None]:
    with controllers(cluster, kueue, jobset):
        yield


@pytest.fixture
def queue(kubectl: Kubectl, lab: str) -> str:
    """A LocalQueue with room for one trainer."""
    quota = [{"name": "cpu", "nominalQuota": CPU}]
    group = {"coveredResources": ["cpu"], "flavors": [{"name": lab, "resources": quota}]}
    made: tuple[Manifest, ...] = (
        {"kind": "ResourceFlavor", "spec": {}},
        {"kind": "ClusterQueue", "spec": {"resourceGroups": [group]}},
        {"kind": "LocalQueue", "spec": {"clusterQueue": lab}},
    )
    for each in made:
        body = {"apiVersion": API, "metadata": {"name": lab}, **each}
        kubectl("-n", lab, "apply", "-f", "-", text=json.dumps(body))
    return lab


def patient(store: Mapping[str, str], queue: str, admission: str) -> Manifest:
    """A run that saves on no step of its own, so that each checkpoint is one of a farewell."""
    run = cut_demo(store, f"runs/{queue}")
    spec = run["spec"]
    spec["phases"] = [{**spec["phases"][1], "maxSteps": 20_000}]
    spec["roles"] = {"trainer": {**spec["roles"]["trainer"], "cpu": CPU}}
    spec["checkpointing"] = {"everySteps": 10_000}
    spec["scheduling"] = {"admission": admission, "queueName": queue}
    del spec["evaluation"]
    return run


def hasty(queue: str) -> Manifest:
    """Somebody else's job, as urgent as can be and as large as the queue."""
    container = {"name": "a", "image": "a", "resources": {"requests": {"cpu": CPU}}}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    sets = [{"name": "main", "count": 1, "template": template}]
    spec = {"queueName": queue, "priority": 1_000, "podSets": sets}
    return {"apiVersion": API, "kind": "Workload", "metadata": {"name": "hasty"}, "spec": spec}


class Scene:
    """One run in its namespace."""

    def __init__(self, kubectl: Kubectl, namespace: str, store: Mapping[str, str]) -> None:
        self.kubectl, self.namespace = kubectl, namespace
        self.folder = Path(store["folder"]) / "runs" / namespace

    def apply(self, body: Manifest) -> None:
        self.kubectl("-n", self.namespace, "apply", "-f", "-", text=json.dumps(body))

    def every(self, kind: str) -> list[Manifest]:
        words = ("-n", self.namespace, "get", kind, "-o", "json")
        items: list[Manifest] = json.loads(self.kubectl(*words))["items"]
        return items

    @property
    def trainers(self) -> list[Manifest]:
        return [pod for pod in self.every("pods") if is_trainer(pod)]

    @property
    def step(self) -> int:
        (run,) = self.every("rlr")
        assert run.get("status", {}).get("phase") != "Failed", run["status"]
        return int(run.get("status", {}).get("step", {}).get("current", 0))

    @property
    def saved(self) -> list[int]:
        """Steps of the complete checkpoints in the store."""
        return [int(path.parent.name) for path in self.folder.glob("checkpoints/*/manifest.json")]

    def until(self, what: str, holds: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not holds():
            shown = [self.every("rlr")[0].get("status"), self.kubectl("get", "pods", "-A")]
            assert time.monotonic() < deadline_s, f"never happened: {what}; {shown}"
            time.sleep(0.5)

    def steps(self) -> list[int]:
        """The steps that the run's own record has, in order."""
        files = sorted(path for path in self.folder.rglob("*.jsonl") if "metrics" in str(path))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [row["global_step"] for row in rows if row["kind"] == "step"]


@pytest.fixture
def scene(kubectl: Kubectl, lab: str, store: Mapping[str, str]) -> Scene:
    return Scene(kubectl, lab, store)


def is_trainer(pod: Manifest) -> bool:
    return bool(pod["metadata"].get("labels", {}).get("etude.dev/role") == "trainer")


def is_ready(checkpoint: Manifest) -> bool:
    return bool(checkpoint.get("status", {}).get("phase") == "Ready")


def evicted(seen: History) -> int:
    """When the queue took the run's quota back."""
    return seen.first(WORKLOADS, lambda each: is_true(each, "Evicted"))


def left(seen: History) -> int:
    """When the first trainer was told to go."""
    return seen.first(PODS, lambda pod: is_trainer(pod) and is_deleting(pod))


def goes_on(scene: Scene, saved: int) -> None:
    """The other job is over: the run takes up where it stopped, and no step is done twice."""
    scene.kubectl("-n", scene.namespace, "delete", WORKLOAD, "hasty")
    scene.until("the run goes on", lambda: scene.step > saved + 2)
    done = scene.steps()
    assert done == list(range(1, len(done) + 1)), "each step once, in order"
    assert len(done) > saved


WORKLOAD = "workloads.kueue.x-k8s.io"


def test_p06_a_run_of_admission_workload_has_a_verified_checkpoint_before_a_pod_of_it_goes(
    cluster: Mapping[str, Any], scene: Scene, store: Mapping[str, str], queue: str
) -> None:
    with history(cluster, queue, PODS, CHECKPOINTS, WORKLOADS) as seen:
        scene.apply(patient(store, queue, "Workload"))
        scene.until("five steps", lambda: scene.step >= 5)
        before = scene.step
        assert scene.saved == []
        scene.apply(hasty(queue))
        scene.until("the pods are gone", lambda: not scene.trainers)
    assert evicted(seen) < seen.first(CHECKPOINTS, is_ready) < left(seen)
    (saved,) = scene.saved
    assert saved >= before
    goes_on(scene, saved)


def test_p06_a_run_of_admission_jobset_saves_as_it_is_told_to_go(
    cluster: Mapping[str, Any], scene: Scene, store: Mapping[str, str], queue: str
) -> None:
    with history(cluster, queue, PODS, WORKLOADS) as seen:
        scene.apply(patient(store, queue, "JobSet"))
        scene.until("five steps", lambda: scene.step >= 5)
        before = scene.step
        assert scene.saved == []
        scene.apply(hasty(queue))
        scene.until("the pods are gone", lambda: not scene.trainers)
    assert evicted(seen) < left(seen)
    (saved,) = scene.saved
    assert saved >= before
    goes_on(scene, saved)
    scene.until("a Checkpoint of it", lambda: any(map(is_ready, scene.every("ckpt"))))
    assert [each["spec"]["step"] for each in scene.every("ckpt")] == [saved]
