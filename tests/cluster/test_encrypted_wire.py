"""A run whose parts prove to each other who they are, on a real node."""

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.cluster.test_run_on_the_node import at_step, get, phase_of, wait_until
from tests.support import pki
from tests.support.cut_demo import cut_demo

ROOT = Path(__file__).parents[2]
SHORT_S = 60
"""Life of a certificate here: each is replaced several times in a run."""

Kubectl = Callable[..., str]
Store = Mapping[str, str]

pytestmark = [pytest.mark.usefixtures("crds"), pytest.mark.timeout(3_600)]


@pytest.fixture
def upgrade(helm: Callable[..., str], kubectl: Kubectl, chart: str) -> Iterator[Callable[..., str]]:
    """Change values of the release, which is as it was afterwards."""

    def to(**values: str) -> str:
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        path = str(ROOT / "helm" / "etude")
        return helm("upgrade", "etude", path, "-n", chart, "--reuse-values", *sets)

    yield to
    to(**{"tls.mode": "Plaintext"})
    kubectl("-n", chart, "scale", "deployment/etude-operator", "--replicas=0")


def add_ca(kubectl: Kubectl, namespace: str, name: str) -> None:
    """A further CA beside those of the release, as a later generation would be."""
    made = pki.Authority(name, ends=pki.now() + 24 * pki.HOUR, begins=pki.now())
    files = {f"{name}.crt": made.pem, f"{name}.key": made.key_pem}
    data = {key: base64.b64encode(text).decode() for key, text in files.items()}
    patch = json.dumps({"data": data})
    kubectl("-n", namespace, "patch", "secret", "etude-ca", "--type=merge", "-p", patch)


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
    kubectl: Kubectl, chart: str, lab: str, store: Store, upgrade: Callable[..., str]
) -> None:
    own = {"tls.mode": "SelfManaged", "tls.selfManaged.replicas": "1", "operator.replicas": "1"}
    upgrade(**own)
    issuer = ("-n", chart, "set", "env", "deployment/etude-issuer")
    kubectl(*issuer, f"ETUDE_TLS_LIFETIME_SECONDS={SHORT_S}")
    for name in ("issuer", "operator"):
        words = ("rollout", "status", f"deployment/etude-{name}", "--timeout=300s")
        kubectl("-n", chart, *words)
    run = cut_demo(store, f"runs/{lab}")
    kubectl("-n", lab, "apply", "-f", "-", text=json.dumps(run))
    wait_until(kubectl, lab, lambda r: r.get("status", {}).get("activePhase") == "rl", "phase rl")
    add_ca(kubectl, chart, "ca-2")
    done = wait_until(kubectl, lab, lambda r: phase_of(r) == "Succeeded", "Succeeded")
    assert at_step(done) == 3
    assert done["status"]["rollouts"]["trained"] > 0
    assert set(restarts(kubectl, lab).values()) <= {0}, restarts(kubectl, lab)
    said = kubectl("-n", chart, "logs", "deployment/etude-issuer")
    assert said.count(f"/ns/{lab}/run/demo/role/trainer") >= 1
