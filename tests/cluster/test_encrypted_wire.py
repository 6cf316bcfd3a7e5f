"""A run whose parts prove to each other who they are, on a real node."""

import json
from collections.abc import Callable, Iterator, Mapping

import pytest
from tests.cluster.test_run_on_the_node import at_step, get, phase_of, wait_until
from tests.support.cut_demo import cut_demo
from tests.support.kube.short_certificates import Release

Kubectl = Callable[..., str]
Store = Mapping[str, str]

pytestmark = [pytest.mark.usefixtures("crds"), pytest.mark.timeout(3_600)]


@pytest.fixture
def release(helm: Callable[..., str], kubectl: Kubectl, chart: str) -> Iterator[Release]:
    """The release, which is as it was afterwards."""
    made = Release(helm, kubectl, chart)
    yield made
    made.restore()


def restarts(kubectl: Kubectl, namespace: str) -> dict[str, int]:
    """How often each container of each pod began again."""
    return {
        f"{pod['metadata']['name']}/{each['name']}": each["restartCount"]
        for pod in get(kubectl, namespace, "pods")["items"]
        for kind in ("containerStatuses", "initContainerStatuses")
        for each in pod["status"].get(kind, ())
    }


@pytest.mark.usefixtures("demo_data")
@pytest.mark.long
def test_a_run_trains_while_its_certificates_and_their_ca_are_replaced(
    kubectl: Kubectl, chart: str, lab: str, store: Store, release: Release
) -> None:
    release.encrypt()
    run = cut_demo(store, f"runs/{lab}")
    kubectl("-n", lab, "apply", "-f", "-", text=json.dumps(run))
    wait_until(kubectl, lab, lambda r: r.get("status", {}).get("activePhase") == "rl", "phase rl")
    release.add_ca(2)
    done = wait_until(kubectl, lab, lambda r: phase_of(r) == "Succeeded", "Succeeded")
    assert at_step(done) == 3
    assert done["status"]["rollouts"]["trained"] > 0
    assert set(restarts(kubectl, lab).values()) <= {0}, restarts(kubectl, lab)
    said = kubectl("-n", chart, "logs", "deployment/etude-issuer")
    assert said.count(f"/ns/{lab}/run/demo/role/trainer") >= 1
