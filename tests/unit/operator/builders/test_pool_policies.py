"""NetworkPolicies of a pool, created and deleted with a field of its spec."""

from typing import Any

import pytest

from etude.operator.manifests import Ref

POLICIES = ["repos-broker", "repos-edge", "repos-node"]


def pool(policy: str) -> dict[str, Any]:
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": {"name": "repos", "namespace": "lab"},
        "spec": {
            "templates": [{"name": "python"}],
            "edge": {"keysRef": {"name": "keys"}},
            "network": {"policy": policy},
        },
    }


RUN = {"apiVersion": "etude.dev/v1alpha1", "kind": "RLRun", "name": "demo", "uid": "r"}


@pytest.mark.parametrize("owners", [[], [{**RUN, "controller": True}]], ids=["alone", "of a run"])
async def test_a_pool_that_is_no_longer_managed_loses_its_policies_and_nothing_else(
    lab: Any, owners: list[dict[str, Any]]
) -> None:
    def body(policy: str) -> dict[str, Any]:
        made = pool(policy)
        return made | {"metadata": made["metadata"] | {"ownerReferences": owners}}

    lab.cluster.upsert(body("Managed"))
    await lab.settle()
    assert sorted(lab.names("NetworkPolicy")) == POLICIES
    before = set(lab.cluster.objects())
    lab.cluster.upsert(body("Unmanaged"))
    await lab.settle()
    gone = {Ref("NetworkPolicy", "lab", name) for name in POLICIES}
    assert before - set(lab.cluster.objects()) == gone
    lab.cluster.upsert(body("Managed"))
    await lab.settle()
    assert set(lab.cluster.objects()) == before
