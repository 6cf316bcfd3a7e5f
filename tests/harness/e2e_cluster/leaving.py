"""The release goes, and what it leaves is taken up by the next one."""

from tests.harness.e2e_cluster.install import install
from tests.harness.e2e_cluster.scene import HOME, LAB, PREFIX, RUN, Object, Scene

from etude.common.checkpoints.manifest import CHECKPOINTS, MANIFEST

LEFT = "deployments,statefulsets,services,jobs,poddisruptionbudgets,networkpolicies,roles"


def uninstall(scene: Scene) -> None:
    """Everything that acts is gone; kinds, runs, checkpoints, keys and data are not."""
    # What retention gave up goes with its operator's help: the data first, then the object.
    scene.wait("no checkpoint that is on its way out", lambda: _going(scene) == [])
    before = _kept(scene)
    scene.shell(f"helm uninstall etude --namespace {HOME} --wait 2>&1")
    scene.wait("no pod of the release that acts", lambda: _acting(scene) == [])
    assert scene.bed.kubectl("-n", HOME, "get", LEFT, "-o", "name") == ""
    assert _kept(scene) == before
    scene.shell(
        f"kubectl get crd; kubectl -n {HOME} get pvc,secrets; kubectl -n {LAB} get rlr,ckpt"
    )


def install_again(scene: Scene) -> None:
    """The data is where it was, under the same keys, and the run is as it was."""
    keys, ca = scene.keys(), scene.ca()
    before = _kept(scene)
    install(scene)
    assert scene.keys() == keys
    assert scene.ca() == ca, "pods that run would believe nobody"
    assert _kept(scene) == before
    store = scene.store(PREFIX)
    for each in scene.checkpoints():
        assert store.head(_manifest(each)), f"{each['metadata']['name']} has lost its data"
    scene.say(f"{len(scene.checkpoints())} checkpoints are in MinIO, as their objects say")


def delete_the_run(scene: Scene) -> None:
    """Its objects go, and of the data what is not said to stay."""
    pinned = scene.checkpoints()[0]
    name = pinned["metadata"]["name"]
    retain = '{"spec":{"deletionPolicy":"Retain"}}'
    scene.bed.kubectl("-n", LAB, "patch", "ckpt", name, "--type=merge", "-p", retain)
    scene.shell(f"kubectl -n {LAB} delete rlr {RUN}")
    words = ("-n", LAB, "ckpt,envp,statefulsets,configmaps,services")
    scene.wait("nothing of the run", lambda: _of_run(scene, *words) == [])
    store = scene.store(PREFIX)
    left = {each.key for each in store.list(CHECKPOINTS) if each.key.endswith(MANIFEST)}
    assert left == {_manifest(pinned)}
    scene.say(f"{name} was to be retained: its data is in MinIO, that of the others is not")


def _acting(scene: Scene) -> list[Object]:
    """Pods of the release; what `helm test` left has ended, and Helm leaves it to be read."""
    found = scene.bed.get("-n", HOME, "pods")["items"]
    return [each for each in found if each["status"]["phase"] != "Succeeded"]


def _going(scene: Scene) -> list[str]:
    phases = {each["metadata"]["name"]: each["status"]["phase"] for each in scene.checkpoints()}
    return [name for name, phase in phases.items() if phase in {"Expired", "Deleting"}]


def _of_run(scene: Scene, *words: str) -> list[Object]:
    found = scene.bed.get(*words)["items"]
    return [each for each in found if each["metadata"]["name"].startswith(RUN)]


def _kept(scene: Scene) -> dict[str, str]:
    """Uids of what outlives a release, by kind and name."""
    found = scene.bed.get("crd")["items"]
    found += scene.bed.get("-n", HOME, "pvc")["items"]
    found.append(scene.bed.get("-n", HOME, "secret", "etude-minio"))
    found += scene.bed.get("-n", LAB, "rlr,ckpt")["items"]
    return {f"{each['kind']}/{each['metadata']['name']}": each["metadata"]["uid"] for each in found}


def _manifest(checkpoint: Object) -> str:
    """Key of a checkpoint's manifest below the run's prefix."""
    uri = checkpoint["spec"]["source"]["uri"].rstrip("/")
    return f"{uri.partition(f'/{PREFIX}/')[2]}/{MANIFEST}"
