"""A new release of the chart while the run trains."""

from tests.harness.e2e_cluster.install import CHART
from tests.harness.e2e_cluster.kills import same
from tests.harness.e2e_cluster.scene import HOME, Scene, step_of

OPERATORS = ("-l", "app.kubernetes.io/component=operator")


def upgrade_the_chart(scene: Scene) -> None:
    """The operator is replaced; no pod of the run is."""
    before = {name: pod.uid for name, pod in scene.pods().items()}
    old = _operators(scene)
    value = "--set operator.resources.requests.cpu=60m"
    words = (
        f"helm upgrade etude {CHART} --namespace {HOME} --reset-then-reuse-values {value} --wait"
    )
    scene.bed.run("sh", "-c", words)
    scene.say(f"helm upgrade etude … {value} --wait")
    deployment = scene.bed.get("-n", HOME, "deployment", "etude-operator")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == "60m"
    scene.wait("the old operator's end", lambda: not _operators(scene) & old)
    run = scene.wait_for_steps(3)
    scene.say(f"another operator leads, and the run is at step {step_of(run)}")
    same(scene, before)


def _operators(scene: Scene) -> set[str]:
    found = scene.bed.get("-n", HOME, "pods", *OPERATORS)["items"]
    return {each["metadata"]["uid"] for each in found}
