"""What a platform adds to the pods that the chart makes beside the operator's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from tests.support.chart.helm import Manifest, Rendered, refusal, rendered

GIVEN: dict[str, Any] = {
    "nodeSelector": {"pool": "stores"},
    "tolerations": [{"key": "stores", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "high",
    "podAnnotations": {"example.com/team": "rl"},
    "podLabels": {"cost": "training", "app.kubernetes.io/component": "other"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraVolumes": [{"name": "more", "configMap": {"name": "more"}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/etc/more", "readOnly": True}],
}
MINIO = {"enabled": True, "image": "localhost/minio:1", "secretName": "keys"}


class Part(NamedTuple):
    """A part of the chart with values of its own for its pods."""

    at: str
    values: Callable[[dict[str, Any]], dict[str, Any]]
    template: Callable[[Rendered], Manifest]
    taken: tuple[str, str]
    """A variable and a volume that the chart sets itself."""


PARTS = [
    Part(
        "tls.selfManaged",
        lambda given: {"tls": {"mode": "SelfManaged", "selfManaged": given}},
        lambda chart: chart.one("Deployment", "etude-issuer")["spec"]["template"],
        ("ETUDE_CA_FOLDER", "ca"),
    ),
    Part(
        "minio",
        lambda given: {"minio": {**MINIO, **given}},
        lambda chart: chart.one("StatefulSet")["spec"]["template"],
        ("MINIO_ROOT_USER", "data"),
    ),
]
parts = pytest.mark.parametrize("part", PARTS, ids=lambda part: part.at)


@parts
def test_they_carry_what_they_are_given(part: Part) -> None:
    before, after = (part.template(rendered(part.values(given))) for given in ({}, GIVEN))
    spec = after["spec"]
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert spec[name] == GIVEN[name]
    assert after["metadata"]["annotations"] == GIVEN["podAnnotations"]
    labels = before["metadata"]["labels"]
    assert after["metadata"]["labels"] == labels | {"cost": "training"}, "selected by the others"
    was, now = (template["spec"]["containers"][0] for template in (before, after))
    assert now["env"] == was["env"] + GIVEN["extraEnv"]
    assert now["volumeMounts"] == was["volumeMounts"] + GIVEN["extraVolumeMounts"]
    by_name = {each["name"]: each for each in spec["volumes"]}
    known = {each["name"]: each for each in before["spec"]["volumes"]}
    assert by_name == known | {"more": GIVEN["extraVolumes"][0]}


@parts
def test_where_they_run_is_their_own_before_it_is_the_operators(part: Part) -> None:
    values = part.values({"nodeSelector": {"pool": "stores"}})
    everybody = {"operator": {"nodeSelector": {"pool": "system"}, "priorityClassName": "high"}}
    spec = part.template(rendered({**values, **everybody}))["spec"]
    assert spec["nodeSelector"] == {"pool": "stores"}
    assert spec["priorityClassName"] == "high"


@parts
def test_what_the_chart_sets_cannot_be_given_twice(part: Part) -> None:
    variable, volume = part.taken
    told = refusal(part.values({"extraEnv": [{"name": variable, "value": "mine"}]}))
    assert f"{part.at}.extraEnv: {variable} is set by the chart" in told
    told = refusal(part.values({"extraVolumes": [{"name": volume, "emptyDir": {}}]}))
    assert f"{part.at}.extraVolumes: the chart has a volume {volume}" in told
