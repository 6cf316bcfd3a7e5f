"""What becomes of runs and pools where cert-manager is to make certificates, and is not there."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from etude.common.api.kinds import EnvPool
from etude.operator.builders.certificates import CertificateMode, CertManagerIssuer, PlatformTls
from etude.operator.manifests import Ref

Build = Callable[..., dict[str, Any]]
TLS = PlatformTls(mode=CertificateMode.CERT_MANAGER, issuer=CertManagerIssuer(name="ca"))
POOL = Ref("EnvPool", "lab", "demo-repos")
SETS = ["demo-inference", "demo-repos-broker", "demo-rewards", "demo-trainer"]


@pytest.fixture
def lab(lab: Any) -> Any:
    chosen = replace(lab.platform, tls=TLS)
    lab.platform = lab.reconciler.platform = chosen
    return lab


def is_served(lab: Any, *, now: bool) -> None:
    """Its CRDs come, or go and take its objects along."""
    lab.cluster.integrations = frozenset({"Certificate"} if now else ())
    if not now:
        for key in list(lab.cluster.objects()):
            if key.kind == "Certificate":
                lab.cluster.purge(key)


def pool(lab: Any) -> EnvPool:
    return EnvPool.parse_known_fields(lab.cluster.objects()[POOL])


async def test_a_run_that_comes_waits_for_cert_manager_and_goes_on_by_itself(
    lab: Any, run_body: Build
) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "CertManagerNotInstalled")
    assert lab.names("StatefulSet") == []
    is_served(lab, now=True)
    await lab.advance(31)
    assert lab.condition("Accepted") == ("True", "Accepted")
    assert "demo-trainer-tls" in lab.names("Certificate")
    assert lab.names("StatefulSet") == SETS


async def test_a_pool_that_comes_waits_for_cert_manager_and_goes_on_by_itself(
    lab: Any, run_body: Build
) -> None:
    spec = run_body()["spec"]["roles"]["environments"][0]["poolTemplate"]
    spec = {**spec, "isolation": {"minimum": "Process"}}
    kind = {"apiVersion": "etude.dev/v1alpha1", "kind": "EnvPool"}
    metadata = {"name": POOL.name, "namespace": POOL.namespace}
    lab.cluster.upsert({**kind, "metadata": metadata, "spec": spec})
    await lab.settle()
    (accepted,) = (c for c in pool(lab).status.conditions if c.type == "Accepted")
    assert accepted.reason == "CertManagerNotInstalled"
    assert lab.names("Pod") == []
    is_served(lab, now=True)
    await lab.advance(31)
    assert f"{POOL.name}-broker-tls" in lab.names("Certificate")
    assert f"{POOL.name}-node-0" in lab.names("Pod")


async def test_what_has_its_secrets_is_looked_after_without_cert_manager(
    lab: Any, run_body: Build
) -> None:
    is_served(lab, now=True)
    lab.cluster.upsert(run_body())
    await lab.settle()
    certificates, pods = lab.names("Certificate"), lab.names("Pod")
    is_served(lab, now=False)
    await lab.kill()
    await lab.settle()
    assert lab.names("Pod") == pods
    lab.cluster.purge(Ref("Pod", "lab", f"{POOL.name}-node-0"))
    await lab.advance(31)
    assert lab.names("Pod") == pods, "a lost node is made again"
    assert lab.names("Certificate") == []
    assert lab.condition("Accepted") == ("True", "Accepted")
    assert {c.reason for c in pool(lab).status.conditions if c.type == "Accepted"} == {"Accepted"}
    is_served(lab, now=True)
    await lab.advance(31)
    assert lab.names("Certificate") == certificates


async def test_a_suspension_and_a_resumption_do_without_cert_manager(
    lab: Any, run_body: Build
) -> None:
    is_served(lab, now=True)
    lab.cluster.upsert(run_body(checkpointing={"onSuspend": "Skip"}))
    await lab.settle()
    is_served(lab, now=False)
    lab.cluster.upsert(run_body(checkpointing={"onSuspend": "Skip"}, suspend=True))
    await lab.settle()
    await lab.advance(60)
    assert lab.condition("Suspended") == ("True", "ByUser")
    assert lab.pods("trainer") == []
    lab.cluster.upsert(run_body(checkpointing={"onSuspend": "Skip"}))
    await lab.settle()
    assert len(lab.pods("trainer")) == 1
