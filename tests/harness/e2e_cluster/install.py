"""From an empty cluster to a run: the chart, the store, the manifest."""

import json
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.harness.e2e_cluster import bed
from tests.harness.e2e_cluster.scene import (
    BUCKET,
    ENDPOINT,
    HOME,
    LAB,
    PREFIX,
    RUN,
    Object,
    Scene,
    step_of,
)
from tests.support.cut_demo import cut_demo, make_data

CHART = bed.ROOT / "helm" / "etude"
VALUES = {
    "image": bed.BASE,
    "minio.enabled": "true",
    "minio.image": bed.MINIO,
    "minio.bucket": BUCKET,
    "minio.size": f"{bed.DISK_GIB}Gi",
}
PHASES = ("cpt", "sft", "rl")
PROMPTS, SIBLINGS = 2, 8
ENOUGH = 240
"""Steps of the last phase; about a hundred pass before a later stage says how many there are."""
PATIENCE = 20
"""Restarts of a role that fails by itself."""
UPLOADS = 16
"""At once: each takes some milliseconds, most of them waiting."""


def install_the_chart(scene: Scene) -> None:
    """A release with MinIO, in a namespace that takes no pod below the restricted standard."""
    scene.bed.kubectl("create", "namespace", HOME)
    restrict(scene, HOME)
    install(scene)
    scene.shell(f"helm test etude --namespace {HOME} --logs --hide-notes")
    scene.shell(f"kubectl -n {HOME} get deployments,statefulsets,pods,pvc")


def install(scene: Scene) -> None:
    """The release, and its pods Ready."""
    sets = " ".join(f"--set {key}={value}" for key, value in VALUES.items())
    profile = f"-f {CHART}/profiles/cpu.yaml"
    words = f"helm install etude {CHART} --namespace {HOME} {profile} {sets} --wait --timeout 10m"
    scene.bed.run("sh", "-c", words)
    scene.say("helm install etude … --wait: the release is there")


def restrict(scene: Scene, namespace: str, *more: str) -> None:
    """Pod Security's strictest standard for a namespace."""
    label = "pod-security.kubernetes.io/enforce=restricted"
    scene.bed.kubectl("label", "namespace", namespace, label, *more)


def fill_the_store(scene: Scene) -> None:
    """Model, tasks and transcripts of the demo in MinIO; the run's namespace with its keys."""
    with tempfile.TemporaryDirectory() as folder:
        make_data({"folder": folder}, tasks=PROMPTS * ENOUGH)
        made = Path(folder, "demo")
        files = (each for each in made.rglob("*") if each.is_file())
        upload(scene, "demo", {str(each.relative_to(made)): each for each in files})
    prepare_namespace(scene)


def upload(scene: Scene, prefix: str, files: Mapping[str, Path]) -> None:
    """Files in MinIO below a prefix, by their keys."""
    store = scene.store(prefix)

    def put(key: str) -> None:
        store.put(key, files[key].read_bytes())

    with ThreadPoolExecutor(UPLOADS) as threads:
        list(threads.map(put, files))
    scene.say(f"{len(files)} objects in s3://{BUCKET}/{prefix}")


def prepare_namespace(scene: Scene) -> None:
    """The namespace of the run, with the keys of the store."""
    scene.bed.kubectl("create", "namespace", LAB)
    restrict(scene, LAB, "etude.dev/weak-isolation=allow")
    literals = [f"--from-literal={key}={value}" for key, value in scene.keys().items()]
    scene.bed.kubectl("-n", LAB, "create", "secret", "generic", "s3", *literals)


def apply_the_run(scene: Scene) -> None:
    """`kubectl apply` of the demo with fewer steps, and phase after phase until rollouts train."""
    run = cut_demo({"endpoint": ENDPOINT}, PREFIX)
    phase = run["spec"]["phases"][2]
    phase["maxSteps"] = ENOUGH
    phase["algorithm"] |= {"promptsPerStep": PROMPTS, "groupSize": SIBLINGS}
    # Ray gives its own processes half a minute to start, which on busy cores they may need twice.
    run["spec"]["failurePolicy"] = {"maxRestarts": PATIENCE}
    run["spec"]["checkpointing"] = {"everySteps": 2}
    run["spec"]["evaluation"][0]["everySteps"] = 100
    manifest = scene.folder / "rlrun.json"
    manifest.write_text(json.dumps(run, indent=1), encoding="utf-8")
    scene.shell(f"kubectl -n {LAB} apply -f {manifest.relative_to(bed.ROOT)}")
    begun_s = time.monotonic()
    for name in PHASES:
        scene.wait_for_run(name, partial(_is_at, name))
        scene.say(f"phase {name} begun after {time.monotonic() - begun_s:.1f} s")
    scene.wait_for_run("two steps", lambda run: step_of(run) >= 2)
    scene.say(f"two steps of rl finished after {time.monotonic() - begun_s:.1f} s")
    scene.shell(f"kubectl -n {LAB} get rlr,envp,ckpt -o wide")
    scene.shell(f"kubectl etude status {RUN} -n {LAB}")


def _is_at(phase: str, run: Object) -> bool:
    """Whether it is in a phase or beyond: a short one may pass between two looks."""
    now = run.get("status", {}).get("activePhase")
    return now in PHASES[PHASES.index(phase) :]


def see_every_role_as_a_pod(scene: Scene) -> None:
    """Trainer, engine, rewards, broker and node are pods, and rollouts train in environments."""
    scene.shell(f"kubectl -n {LAB} get pods -o wide")
    pods = scene.pods().values()
    roles = {each.role for each in pods if each.is_ready}
    assert roles == {"trainer", "inference", "rewards", "broker", "node"}, pods
    status = scene.run()["status"]
    assert status["rollouts"]["trained"] > 0
    (environment,) = status["environments"]
    assert environment["ready"]
    assert environment["driver"] == "process"
    scene.say(f"{status['rollouts']['trained']} rollouts trained, driver {environment['driver']}")
