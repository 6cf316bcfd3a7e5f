"""Parts of pod templates, free parameters and metadata, as people write them and as they get them
wrong: the schema of our kinds knows little of these."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.harness.mutations.schema import Steps
from tests.harness.mutations.values import Raw

HUGE = "x" * 200 * 1_024
NODE_AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}
            ]
        }
    }
}
BAD_AFFINITY = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}}
POD_SPECS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("affinity", {"affinity": NODE_AFFINITY}),
    ("an affinity without its key", {"affinity": BAD_AFFINITY}),
    ("an empty affinity", {"affinity": {}}),
    ("no affinity", {"affinity": None}),
    ("a toleration", {"tolerations": [{"key": "a", "operator": "Exists"}]}),
    ("a toleration of an unknown operator", {"tolerations": [{"key": "a", "operator": "Has"}]}),
    ("tolerations taken away", {"tolerations": []}),
    ("a volume", {"volumes": [{"name": "more", "emptyDir": {"sizeLimit": "1Gi"}}]}),
    (
        "a volume of a bad size",
        {"volumes": [{"name": "more", "emptyDir": {"sizeLimit": "1.5.Gi"}}]},
    ),
    ("a volume twice", {"volumes": [{"name": "m", "emptyDir": {}}, {"name": "m", "emptyDir": {}}]}),
    ("a folder of the machine", {"volumes": [{"name": "h", "hostPath": {"path": "/"}}]}),
    ("the machine's network", {"hostNetwork": True}),
    ("no network of the machine", {"hostNetwork": False}),
    ("a host of its own", {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}]}),
    ("a host without an address", {"hostAliases": [{"ip": "a", "hostnames": ["a"]}]}),
    ("a spread", {"topologySpreadConstraints": []}),
    ("a spread of nothing", {"topologySpreadConstraints": [{"maxSkew": 0}]}),
    ("an init container", {"initContainers": [{"name": "i", "image": "a"}]}),
    ("an init container without a name", {"initContainers": [{"image": "a"}]}),
    (
        "a container's request",
        {"containers": [{"name": "trainer", "resources": {"requests": {"cpu": "1.5"}}}]},
    ),
    (
        "a container's bad request",
        {"containers": [{"name": "trainer", "resources": {"requests": {"cpu": "1.5.Gi"}}}]},
    ),
    (
        "a limit below its request",
        {
            "containers": [
                {"name": "trainer", "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}
            ]
        },
    ),
    (
        "a limit as a number",
        {"containers": [{"name": "trainer", "resources": {"limits": {"cpu": 3}}}]},
    ),
    ("a variable", {"containers": [{"name": "trainer", "env": [{"name": "B", "value": "2"}]}]}),
    (
        "a variable as a number",
        {"containers": [{"name": "trainer", "env": [{"name": "B", "value": 2}]}]},
    ),
    (
        "a variable of a Secret",
        {
            "containers": [
                {
                    "name": "trainer",
                    "env": [
                        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
                    ],
                }
            ]
        },
    ),
    (
        "a variable of the operator",
        {"containers": [{"name": "trainer", "env": [{"name": "ETUDE_PORT", "value": "1"}]}]},
    ),
    (
        "a variable twice",
        {
            "containers": [
                {
                    "name": "trainer",
                    "env": [{"name": "B", "value": "1"}, {"name": "B", "value": "2"}],
                }
            ]
        },
    ),
    ("privilege", {"containers": [{"name": "trainer", "securityContext": {"privileged": True}}]}),
    ("a second container", {"containers": [{"name": "sidecar", "image": "a"}]}),
    ("a container that is text", {"containers": ["trainer"]}),
    ("containers that are text", {"containers": "trainer"}),
    ("no containers", {"containers": None}),
    ("an end of its own", {"restartPolicy": "Never"}),
    ("names from elsewhere", {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.1"]}}),
    ("a bad rule for names", {"dnsPolicy": "Sometimes"}),
    ("a scheduler", {"schedulerName": "volcano"}),
    ("an unknown field", {"nonesuch": 1}),
    ("a text for a number", {"terminationGracePeriodSeconds": "soon"}),
    ("a fraction for a number", {"terminationGracePeriodSeconds": 1.5}),
    ("a negative time", {"terminationGracePeriodSeconds": -1}),
    ("a number beyond every double", {"terminationGracePeriodSeconds": Raw("1e309")}),
    ("a directive", {"$patch": "replace"}),
    ("an account", {"serviceAccountName": "default", "automountServiceAccountToken": True}),
    ("root", {"securityContext": {"runAsUser": 0, "runAsNonRoot": False}}),
    ("a gate", {"schedulingGates": [{"name": "example.com/wait"}]}),
    ("a gate without a domain", {"schedulingGates": [{"name": "not a name"}]}),
    ("a node", {"nodeName": "node-1"}),
    ("a subdomain", {"subdomain": "Not_A_Name"}),
    ("an overhead", {"overhead": {"cpu": "1"}}),
    ("a deadline", {"activeDeadlineSeconds": 0}),
    (
        "200 KiB of a variable",
        {"containers": [{"name": "trainer", "env": [{"name": "B", "value": HUGE}]}]},
    ),
)
PARAMETERS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        (f"a clip of {text}", {"clipLow": Raw(text)})
        for text in ("0", "-0", "1e-320", "1e308", "0.30000000000000004", "1e309", "-1e309", "2")
    ),
    ("an unknown parameter", {"nonesuch": 1}),
    ("a parameter as text", {"clipLow": "NaN"}),
    ("a parameter as nothing", {"clipLow": None}),
    ("a parameter as a list", {"clipLow": [0.2]}),
    ("a parameter as truth", {"clipLow": True}),
    ("a parameter in other letters", {"ClipLow": 0.2}),
    ("200 KiB of parameters", {"clipLow": 0.2, "note": HUGE}),
)
METADATA: tuple[tuple[str, dict[str, Any]], ...] = (
    ("a label", {"labels": {"team": "rl"}}),
    ("a label of a run", {"labels": {"etude.dev/run": "other"}}),
    ("a label of a pool", {"labels": {"etude.dev/pool": "other"}}),
    ("a label of a checkpoint", {"labels": {"etude.dev/checkpoint": "other"}}),
    ("a label that says managed", {"labels": {"app.kubernetes.io/managed-by": "etude"}}),
    ("a bad label", {"labels": {"a": "b c"}}),
    ("a label of nothing", {"labels": {"a": None}}),
    ("200 KiB of annotations", {"annotations": {"example.com/note": HUGE}}),
    ("300 KiB of annotations", {"annotations": {"example.com/note": HUGE + HUGE[: 100 * 1_024]}}),
    ("an annotation in another script", {"annotations": {"example.com/note": "\u00e9\U0001f600"}}),
    ("a bad annotation", {"annotations": {"bad key": "a"}}),
    ("an annotation of ours", {"annotations": {"etude.dev/applied": "0"}}),
    ("a finalizer", {"finalizers": ["not a name"]}),
)
FREE: Mapping[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "spec.roles.trainer.podTemplate.spec": POD_SPECS,
    "spec.phases[1].algorithm.parameters": PARAMETERS,
    "spec.phases[1].curriculum.parameters": (
        ("an unknown parameter", {"nonesuch": 1}),
        ("a parameter", {"target": "0.7"}),
        ("a parameter as a number", {"target": 0.7}),
        ("a parameter below its limit", {"target": "-1"}),
        ("a parameter as a list", {"target": ["0.7"]}),
    ),
    "spec.roles.rewards.functions[0].parameters": (
        ("an unknown parameter", {"nonesuch": 1}),
        ("a parameter", {"onlyWhenFinished": True}),
        ("a parameter as text", {"onlyWhenFinished": "perhaps"}),
    ),
}


def known(steps: Steps, path: str) -> Iterator[tuple[str, Any]]:
    """What people put at a place that our schema leaves open."""
    yield from FREE.get(path, ())
    if steps[-1] == "metrics":
        yield from (("a figure", {"reward": text}) for text in ("NaN", "1e309", "-0", "x" * 65))
