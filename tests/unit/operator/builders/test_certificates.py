"""Certificates of pods and the objects that their owners apply."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from etude.common.api.kinds import EnvPool, RLRun
from etude.common.tls.identity import Identity
from etude.operator.builders import pool as desired_pools
from etude.operator.builders import run as desired
from etude.operator.builders.certificates import CertificateMode, CertManagerIssuer, PlatformTls
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape
from etude.operator.manifests import Manifest, Ref, ref

Build = Callable[..., dict[str, Any]]
TRUST = "-----BEGIN CERTIFICATE-----\n"
CHOICES = {
    CertificateMode.SELF_MANAGED: PlatformTls(
        mode=CertificateMode.SELF_MANAGED, target="i.etude-system.svc:7060", trust=TRUST
    ),
    CertificateMode.CERT_MANAGER: PlatformTls(
        mode=CertificateMode.CERT_MANAGER, issuer=CertManagerIssuer(name="ca")
    ),
    CertificateMode.SECRET: PlatformTls(mode=CertificateMode.SECRET, secret="wire"),
    CertificateMode.PLAINTEXT: PlatformTls(mode=CertificateMode.PLAINTEXT),
}
EDGE = {"keysRef": {"name": "keys"}}


@pytest.fixture
def made(run_body: Build, platform: Platform) -> Callable[[PlatformTls | None], list[Manifest]]:
    """Everything of a run and of its pool, which has an edge."""

    def make(tls: PlatformTls | None) -> list[Manifest]:
        given = replace(platform, tls=tls)
        run = RLRun.model_validate(run_body())
        found = desired.run_children(run, RunShape(images=platform.images), given)
        body = next(each for each in found if each["kind"] == "EnvPool")
        body["metadata"]["uid"] = "uid-pool"
        pool = EnvPool.model_validate({**body, "spec": {**body["spec"], "edge": EDGE}})
        return found + desired_pools.pool_children(pool, (0,), platform.images, given)

    return make


def pods(found: list[Manifest]) -> dict[str, Manifest]:
    """The spec of each pod, by its role."""
    specs = {}
    for each in found:
        match each["kind"]:
            case "StatefulSet":
                template = each["spec"]["template"]
                specs[template["metadata"]["labels"]["etude.dev/role"]] = template["spec"]
            case "Pod":
                specs[each["metadata"]["labels"]["etude.dev/role"]] = each["spec"]
            case _:
                continue
    return specs


def told(spec: Manifest, variable: str) -> str | None:
    values = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
    return values.get(variable)


ROLES = {"trainer", "inference", "rewards", "broker", "node", "edge"}


@pytest.mark.parametrize("mode", [m for m in CertificateMode if m is not CertificateMode.PLAINTEXT])
def test_every_pod_finds_a_certificate_where_it_is_told_to_look(
    made: Any, mode: CertificateMode
) -> None:
    found = pods(made(CHOICES[mode]))
    assert found.keys() == ROLES
    for role, spec in found.items():
        folder = told(spec, "ETUDE_TLS")
        mounts = {each["mountPath"]: each for each in spec["containers"][0]["volumeMounts"]}
        assert folder in mounts, role
        assert mounts[folder]["readOnly"] is True
        assert mounts[folder]["name"] in {volume["name"] for volume in spec["volumes"]}


def test_plaintext_is_said_and_nothing_is_mounted_for_it(made: Any) -> None:
    for spec in pods(made(CHOICES[CertificateMode.PLAINTEXT])).values():
        assert told(spec, "ETUDE_TLS") == "Plaintext"
        assert not [volume for volume in spec["volumes"] if volume["name"].startswith("tls")]


def test_pods_without_a_certificate_setting_get_no_tls_mode(made: Any) -> None:
    for spec in pods(made(None)).values():
        assert told(spec, "ETUDE_TLS") is None


def test_cert_manager_is_asked_for_one_certificate_per_part(made: Any) -> None:
    found = made(CHOICES[CertificateMode.CERT_MANAGER])
    certificates = {m["spec"]["secretName"]: m for m in found if m["kind"] == "Certificate"}
    mounted = {
        volume["secret"]["secretName"]
        for spec in pods(found).values()
        for volume in spec["volumes"]
        if volume["name"] == "tls"
    }
    assert certificates.keys() == mounted
    assert len(mounted) == len(ROLES), "no part has another's key"
    names = {tuple(each["spec"]["uris"]) for each in certificates.values()}
    assert len(names) == len(ROLES)
    for each in certificates.values():
        (uri,) = each["spec"]["uris"]
        assert each["spec"]["dnsNames"] == [Identity.parse(uri).server_name]
        assert each["spec"]["issuerRef"]["name"] == "ca"
        assert each["metadata"]["ownerReferences"][0]["controller"] is True


def test_a_runs_own_pool_is_known_as_the_runs(made: Any) -> None:
    found = made(CHOICES[CertificateMode.CERT_MANAGER])
    uris = [m["spec"]["uris"][0] for m in found if m["kind"] == "Certificate"]
    assert "spiffe://etude.dev/ns/lab/run/demo/pool/demo-repos/role/broker" in uris
    assert "spiffe://etude.dev/ns/lab/run/demo/role/trainer" in uris


def test_a_kept_pods_token_is_good_for_its_identity_and_nothing_else(made: Any) -> None:
    for role, spec in pods(made(CHOICES[CertificateMode.SELF_MANAGED])).items():
        (keeper,) = spec["initContainers"]
        assert keeper["restartPolicy"] == "Always", "a sidecar"
        volumes = {each["name"]: each for each in spec["volumes"]}
        (source,) = volumes["tls-token"]["projected"]["sources"]
        audience = source["serviceAccountToken"]["audience"]
        assert Identity.parse(audience).role == role
        given = {each["name"]: each["value"] for each in keeper["env"]}
        assert given["ETUDE_TLS_IDENTITY"] == audience
        mounted = {each["name"] for each in spec["containers"][0]["volumeMounts"]}
        assert "tls-token" not in mounted, "the role itself never sees the token"
        assert spec["automountServiceAccountToken"] is False


def test_a_kept_pod_believes_the_ca_that_the_operator_was_installed_with(made: Any) -> None:
    found = made(CHOICES[CertificateMode.SELF_MANAGED])
    maps = {m["metadata"]["name"]: m["data"] for m in found if m["kind"] == "ConfigMap"}
    for spec in pods(found).values():
        (trust,) = [each for each in spec["volumes"] if each["name"] == "tls-trust"]
        assert maps[trust["configMap"]["name"]] == {"ca.crt": TRUST}


def test_kept_pods_may_reach_the_issuer_and_others_may_not(made: Any) -> None:
    def reached(mode: CertificateMode) -> set[str]:
        return {
            policy["metadata"]["name"]
            for policy in made(CHOICES[mode])
            if policy["kind"] == "NetworkPolicy"
            for rule in policy["spec"]["egress"]
            if any(port["port"] == 7060 for port in rule.get("ports", ()))
        }

    assert len(reached(CertificateMode.SELF_MANAGED)) == len(ROLES)
    assert reached(CertificateMode.CERT_MANAGER) == set()


def test_a_host_says_who_answers_at_its_address(made: Any) -> None:
    spec = pods(made(CHOICES[CertificateMode.SELF_MANAGED]))["node"]
    assert told(spec, "ETUDE_ADVERTISE") == "demo-repos-node@$(ETUDE_POD_IP):7030"


@pytest.mark.parametrize("mode", CertificateMode)
def test_a_run_and_a_pool_of_one_name_have_no_object_in_common(
    run_body: Build, platform: Platform, mode: CertificateMode
) -> None:
    given = replace(platform, tls=CHOICES[mode])
    run = RLRun.model_validate(run_body())
    metadata = {"name": run.metadata.name, "namespace": "lab", "uid": "uid-pool"}
    spec = {"templates": [{"name": "python"}], "isolation": {"minimum": "Process"}, "edge": EDGE}
    pool = EnvPool.model_validate({"metadata": metadata, "spec": spec})
    of_run = desired.run_children(run, RunShape(images=platform.images), given)
    of_pool = desired_pools.pool_children(pool, (0,), platform.images, given)
    assert not set(map(ref, of_run)) & set(map(ref, of_pool))


def test_no_pod_and_no_object_holds_a_key(made: Any) -> None:
    for tls in CHOICES.values():
        kinds = {each["kind"] for each in made(tls)}
        assert "Secret" not in kinds


async def test_what_a_run_trusted_stays_when_its_cluster_trusts_otherwise(
    lab: Any, run_body: Build
) -> None:
    """The operator may not delete ConfigMaps: one that nobody needs goes with its run."""
    trusting = replace(lab.platform, tls=CHOICES[CertificateMode.SELF_MANAGED])
    lab.platform = lab.reconciler.platform = trusting
    lab.cluster.upsert(run_body())
    await lab.settle()
    trust = Ref("ConfigMap", "lab", "demo-trust")
    assert lab.cluster.get(trust) is not None
    lab.platform = lab.reconciler.platform = replace(
        trusting, tls=CHOICES[CertificateMode.PLAINTEXT]
    )
    lab.cluster.upsert(run_body(suspend=True))
    await lab.settle()
    assert lab.cluster.get(trust) is not None
    assert lab.condition("Accepted") == ("True", "Accepted")
