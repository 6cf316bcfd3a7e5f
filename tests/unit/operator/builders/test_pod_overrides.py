"""Pod template overrides of roles."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.common.api.kinds import RLRun
from etude.common.api.lint.linter import lint_text
from etude.common.api.run.pod_template import (
    MERGE_KEYS,
    directive_errors,
    duplicate_errors,
    host_access_errors,
    is_reserved,
    shape_errors,
    variable_names,
)
from etude.operator.builders import run as desired
from etude.operator.builders import strategic_merge
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape
from etude.operator.manifests import Manifest

Build = Callable[..., dict[str, Any]]
NAMES = st.sampled_from(["a", "b", "c"])
ENV = st.lists(
    st.fixed_dictionaries({"name": NAMES, "value": NAMES}), unique_by=lambda e: e["name"]
)
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(),
        "nodeSelector": st.dictionaries(NAMES, NAMES),
        "tolerations": st.lists(st.fixed_dictionaries({"key": NAMES})),
        "containers": st.lists(
            st.fixed_dictionaries({"name": NAMES, "env": ENV}), unique_by=lambda c: c["name"]
        ),
    },
)


@given(SPECS)
def test_nothing_laid_over_changes_nothing(spec: Manifest) -> None:
    assert strategic_merge.strategic_merge(spec, {}) == spec


@given(SPECS, SPECS)
def test_to_lay_the_same_over_twice_is_as_once(below: Manifest, above: Manifest) -> None:
    once = strategic_merge.strategic_merge(below, above)
    assert strategic_merge.strategic_merge(once, above) == once


@given(SPECS, SPECS)
def test_what_is_laid_over_is_all_there_and_what_it_does_not_name_stays(
    below: Manifest, above: Manifest
) -> None:
    found = strategic_merge.strategic_merge(below, above)
    assert found.get("priority") == above.get("priority", below.get("priority"))
    assert found.get("tolerations") == above.get("tolerations", below.get("tolerations"))
    selectors = {**below.get("nodeSelector", {}), **above.get("nodeSelector", {})}
    assert found.get("nodeSelector", {}) == selectors
    assert values(found) == {**values(below), **values(above)}


def values(spec: Manifest) -> dict[tuple[str, str], str]:
    return {
        (container["name"], item["name"]): item["value"]
        for container in spec.get("containers", ())
        for item in container["env"]
    }


def test_a_volume_of_another_kind_replaces_one_and_null_takes_a_field_away() -> None:
    below = {"volumes": [{"name": "scratch", "emptyDir": {}}], "priority": 1}
    claim = {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {}}}
    assert strategic_merge.strategic_merge(below, {"volumes": [claim], "priority": None}) == {
        "volumes": [claim]
    }


def workload(body: dict[str, Any], platform: Platform, role: str) -> Manifest:
    children = desired.run_children(
        RLRun.model_validate(body), RunShape(images=platform.images), platform
    )
    name = f"demo-{role}"
    (found,) = [c for c in children if c["kind"] == "StatefulSet" and c["metadata"]["name"] == name]
    return found


def with_role(run_body: Build, role: str, **fields: Any) -> dict[str, Any]:
    roles = run_body()["spec"]["roles"]
    return run_body(roles={**roles, role: {**roles.get(role, {}), **fields}})


def test_a_role_runs_where_and_on_what_its_spec_says(run_body: Build, platform: Platform) -> None:
    body = with_role(
        run_body,
        "inference",
        gpusPerReplica=2,
        gpuResource="amd.com/gpu",
        resourceClaims=[{"name": "link", "resourceClaimTemplateName": "nvlink"}],
        tolerations=[{"key": "gpu", "operator": "Exists"}],
        priorityClassName="high",
        runtimeClassName="nvidia",
    )
    spec = workload(body, platform, "inference")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {"amd.com/gpu": "2"}
    assert container["resources"]["claims"] == [{"name": "link"}]
    assert spec["resourceClaims"] == [{"name": "link", "resourceClaimTemplateName": "nvlink"}]
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert (spec["priorityClassName"], spec["runtimeClassName"]) == ("high", "nvidia")


def test_a_pod_template_is_laid_over_the_operators(run_body: Build, platform: Platform) -> None:
    over = {
        "labels": {"team": "reasoning"},
        "annotations": {"karpenter.sh/do-not-disrupt": "true"},
        "spec": {
            "containers": [
                {"name": "trainer", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
                {"name": "sidecar", "image": "example/sidecar:1"},
            ],
            "topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1}],
            "imagePullSecrets": [{"name": "registry"}],
        },
    }
    plain = workload(run_body(), platform, "trainer")
    shaped = workload(with_role(run_body, "trainer", podTemplate=over), platform, "trainer")
    template, before = shaped["spec"]["template"], plain["spec"]["template"]
    assert template["metadata"]["labels"] == before["metadata"]["labels"] | {"team": "reasoning"}
    assert template["metadata"]["annotations"] == over["annotations"]
    trainer, sidecar = template["spec"]["containers"]
    (ours,) = before["spec"]["containers"]
    assert trainer == ours | {"env": [*ours["env"], {"name": "NCCL_DEBUG", "value": "INFO"}]}
    assert sidecar["name"] == "sidecar"
    assert template["spec"]["topologySpreadConstraints"] == [{"topologyKey": "zone", "maxSkew": 1}]
    assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert shaped["spec"]["selector"] == plain["spec"]["selector"]


def own(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "trainer", **fields}]}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"hostNetwork": True}, "hostNetwork: pods keep their own namespaces"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "volumes[0].hostPath"),
        (
            {"containers": [{"name": "trainer", "securityContext": {"privileged": True}}]},
            "containers[0].securityContext.privileged",
        ),
        ({"containers": [{"$patch": "delete", "name": "trainer"}]}, "containers[0].$patch"),
        (
            {"containers": [{"name": "trainer", "env": [{"name": "ETUDE_PORT", "value": "1"}]}]},
            "ETUDE_PORT is set by the operator",
        ),
        (
            {"containers": [{"name": "trainer", "env": [{"name": "A"}, {"name": "A"}]}]},
            "containers[0].env: A is given twice",
        ),
        ({"volumes": [{"name": "v"}, {"name": "v"}]}, "volumes: v is given twice"),
        ({"containers": [1]}, "containers[0]: must be an object"),
        ({"containers": [None]}, "containers[0]: must be an object"),
        ({"containers": None}, "containers: must be a list"),
        ({"containers": {"name": "trainer"}}, "containers: must be a list"),
        ({"containers": [{"image": "a"}]}, "containers[0]: name is missing"),
        ({"containers": [{"name": {"a": 1}}]}, "containers[0].name: must be text or a number"),
        ({"volumes": [{"name": [1]}]}, "volumes[0].name: must be text or a number"),
        ({"volumes": [1]}, "volumes[0]: must be an object"),
        (own(env=[1]), "containers[0].env[0]: must be an object"),
        (own(ports=[9100]), "containers[0].ports[0]: must be an object"),
        (own(volumeMounts=["x"]), "containers[0].volumeMounts[0]: must be an object"),
        (own(env=None), "containers[0].env: must be a list"),
        (own(ports={"containers": None}), "containers[0].ports: must be a list"),
        (own(command=["a", 1]), "containers[0].command: must be a list of text"),
    ],
)
async def test_what_would_let_a_pod_out_or_break_it_is_refused_by_name(
    lab: Any, run_body: Build, spec: dict[str, Any], words: str
) -> None:
    body = with_role(run_body, "trainer", podTemplate={"spec": spec})
    assert any(words in finding.what for finding in lint_text(json.dumps(body), name="run"))
    lab.cluster.upsert(body)
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "InvalidParameters")
    message = next(c.message for c in lab.run().status.conditions if c.type == "Accepted")
    assert "spec.roles.trainer.podTemplate.spec." in message
    assert words in message
    assert lab.names("StatefulSet") == []


@pytest.mark.parametrize("label", ["etude.dev/run", "app.kubernetes.io/managed-by"])
def test_labels_of_the_operator_cannot_be_taken(run_body: Build, label: str) -> None:
    with pytest.raises(ValueError, match="are the operator's"):
        RLRun.model_validate(with_role(run_body, "trainer", podTemplate={"labels": {label: "x"}}))


def test_a_label_may_have_the_name_of_a_list() -> None:
    chosen: Manifest = {"labelSelector": {"matchLabels": {"env": "prod"}}, "topologyKey": "zone"}
    assert not list(shape_errors({"topologySpreadConstraints": [chosen]}, "trainer"))


KEYS = st.sampled_from([*MERGE_KEYS, *MERGE_KEYS.values(), "command", "resources", "$patch", "x"])
WORDS = st.sampled_from(["trainer", "", "a"])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
JSON = st.recursive(PLAIN, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=4))
OWN = st.dictionaries(KEYS, JSON, max_size=4).map(lambda found: own(**found))
WORKLOADS: tuple[Manifest, ...] = (
    {},
    {"workload": "JobSet", "idleRoles": "Hold"},
    {"workload": "RayCluster"},
)


@given(spec=st.dictionaries(KEYS, JSON, max_size=5) | OWN, scheduling=st.sampled_from(WORKLOADS))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_laid_over_is_refused_by_name_or_makes_a_run(
    run_body: Build, platform: Platform, spec: Manifest, scheduling: Manifest
) -> None:
    body = with_role(run_body, "trainer", podTemplate={"spec": spec})
    body["spec"]["scheduling"] = scheduling
    run = RLRun.model_validate(body)
    served = replace(platform, integrations=frozenset({"jobset", "kuberay"}))
    if not judged(spec):
        assert desired.run_children(run, RunShape(images=platform.images), served)


def judged(spec: Manifest) -> list[str]:
    """What is said of a pod spec; all that judge it take any."""
    names = [name for name in variable_names(spec, "trainer") if is_reserved(name)]
    return [
        *shape_errors(spec, "trainer"),
        *directive_errors(spec),
        *host_access_errors(spec),
        *duplicate_errors(spec),
        *names,
    ]
