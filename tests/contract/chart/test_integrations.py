"""APIs of other projects: rights for what is enabled, and for nothing else."""

from typing import Any

import pytest
from tests.support.chart.helm import rendered

from etude.operator.integrations.apis import INTEGRATIONS
from etude.operator.manifests import CLUSTER_SCOPED, CREATE_ONLY, IMMUTABLE, READ_ONLY, RESOURCES

NAMES = [each.name for each in INTEGRATIONS]
USED = {"list", "watch"}
MADE = {"get", "list", "watch", "create", "delete"}


def rights(values: dict[str, Any]) -> set[tuple[str, str, str]]:
    """API group, resource and verb of everything that the operator may do."""
    release = rendered(values)
    return {
        (group, resource, verb)
        for kind in ("Role", "ClusterRole")
        for role in release.of(kind)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("integration", INTEGRATIONS, ids=NAMES)
def test_an_integration_grants_what_the_operator_does_with_its_kinds(integration: Any) -> None:
    wanted = set()
    for kind in integration.kinds:
        api_version, plural = RESOURCES[kind]
        changed = set() if kind in IMMUTABLE else {"patch"}
        verbs = USED if kind in READ_ONLY else MADE | changed
        wanted |= {(api_version.partition("/")[0], plural, verb) for verb in verbs}
    if "Workload" in integration.kinds:
        wanted.add(("kueue.x-k8s.io", "workloads/status", "patch"))
    values = {"integrations": {integration.name: {"enabled": True}}}
    assert rights(values) - rights({}) == wanted


def test_nothing_is_granted_or_looked_for_by_default() -> None:
    groups = {
        RESOURCES[kind].api_version.partition("/")[0] for i in INTEGRATIONS for kind in i.kinds
    }
    assert not groups & {group for group, _, _ in rights({})}
    assert "ETUDE_INTEGRATIONS" not in {e["name"] for e in rendered({}).pod["containers"][0]["env"]}


def test_the_operator_looks_for_what_is_enabled() -> None:
    values = {"integrations": {name: {"enabled": True} for name in NAMES}}
    env = {e["name"]: e.get("value") for e in rendered(values).pod["containers"][0]["env"]}
    assert env["ETUDE_INTEGRATIONS"].split(",") == sorted(NAMES)


def test_named_namespaces_need_a_right_on_the_cluster_for_queues_alone() -> None:
    for integration in INTEGRATIONS:
        enabled = {integration.name: {"enabled": True}}
        release = rendered({"watch": {"namespaces": ["lab"]}, "integrations": enabled})
        has_one = any(kind in CLUSTER_SCOPED for kind in integration.kinds)
        assert len(release.of("ClusterRole")) == has_one
    assert set(CREATE_ONLY) <= {kind for each in INTEGRATIONS for kind in each.kinds}
