"""Pod overrides of users for the operator's pods, and the devices that these claim."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

from pydantic import Field, JsonValue

from etude.common.api.meta import LabelValue, Model, Name, ObjectName, Rule

RESERVED_LABELS = ("etude.dev/", "app.kubernetes.io/managed-by")
HOST_NAMESPACES = ("hostNetwork", "hostPID", "hostIPC", "hostUsers")
"""Fields of a pod spec by which it leaves its own namespaces."""

MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
}
"""What items of a list are told apart by when one pod spec is laid over another, by the name of the
list (k8s.io/api core/v1, `patchMergeKey`); every other list is replaced whole."""


class ResourceClaim(Model):
    """Devices that a pod claims through dynamic resource allocation."""

    name: Name
    """Its name in the pod."""
    resource_claim_template_name: ObjectName
    """ResourceClaimTemplate of the namespace from which each pod's claim is made."""


def is_reserved_label(key: str) -> bool:
    """True if the operator sets this label on pods."""
    return key.startswith(RESERVED_LABELS[0]) or key in RESERVED_LABELS


class PodTemplate(Model):
    """Overrides for the pods of a role."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.labels) || self.labels.all(k,"
            " !k.startsWith('etude.dev/') && k != 'app.kubernetes.io/managed-by')",
            holds=lambda s: not any(map(is_reserved_label, s.labels)),
            message="labels of etude.dev and app.kubernetes.io/managed-by are the operator's",
            fix="remove them, or take a prefix of your own",
            field_path=".labels",
        ),
    )

    labels: dict[str, LabelValue] = Field(default_factory=dict, max_length=32)
    """Labels beside the operator's."""
    annotations: dict[str, Annotated[str, Field(max_length=4_096)]] = Field(
        default_factory=dict, max_length=32
    )
    """Annotations."""
    spec: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    """A part of a pod spec, merged over the operator's as kubectl merges a patch: containers and
    volumes by name, environment variables by name, mounts by path; other lists replace. The role's
    container has the role's name."""


def host_access_errors(spec: Mapping[str, JsonValue]) -> Iterator[str]:
    """Fields of a pod spec that would let the pod out of its isolation boundary."""
    for name in HOST_NAMESPACES:
        if name in spec:
            yield f"{name}: pods keep their own namespaces"
    for index, volume in enumerate(_items(spec, "volumes")):
        if "hostPath" in volume:
            yield f"volumes[{index}].hostPath: pods see no folder of their machine"
    for part in ("containers", "initContainers"):
        for index, container in enumerate(_items(spec, part)):
            context = container.get("securityContext")
            if isinstance(context, dict) and context.get("privileged"):
                yield f"{part}[{index}].securityContext.privileged: no container is privileged"


def shape_errors(spec: Mapping[str, JsonValue], container: str) -> Iterator[str]:
    """List items that a merge cannot identify, and containers that could not start a role.

    Nothing else may be asked of a pod spec, or be made of it, before this finds nothing.

    Args:
        spec: a part of a pod spec.
        container: the name of the role's own, of which the operator's renderings read parts.
    """
    yield from _unkeyed(spec)
    containers = spec.get("containers", [])
    if not isinstance(containers, list):
        yield "containers: must be a list"
        return
    for index, item in enumerate(containers):
        if isinstance(item, dict) and item.get("name") == container:
            for name in ("env", "ports"):
                if not isinstance(item.get(name, []), list):
                    yield f"containers[{index}].{name}: must be a list"
            command = item.get("command", [])
            if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
                yield f"containers[{index}].command: must be a list of text"


def _unkeyed(above: JsonValue | Mapping[str, JsonValue], at: str = "") -> Iterator[str]:
    """Items of lists that a merge looks for a key in, and that have none to be told apart by."""
    if isinstance(above, Mapping):
        for name, value in above.items():
            here = f"{at}.{name}" if at else name
            # What is no list has another meaning: a label may have the name `env`, too.
            if name in MERGE_KEYS and isinstance(value, list):
                for index, item in enumerate(value):
                    yield from _without_key(item, MERGE_KEYS[name], f"{here}[{index}]")
            yield from _unkeyed(value, here)
    elif isinstance(above, list):
        for index, item in enumerate(above):
            yield from _unkeyed(item, f"{at}[{index}]")


def _without_key(item: JsonValue, key: str, at: str) -> Iterator[str]:
    if not isinstance(item, dict):
        yield f"{at}: must be an object"
    elif key not in item:
        yield f"{at}: {key} is missing"
    elif isinstance(item[key], bool) or not isinstance(item[key], str | int | float):
        yield f"{at}.{key}: must be text or a number"


def directive_errors(value: JsonValue, at: str = "") -> Iterator[str]:
    """Keys that a patch of kubectl would take for instructions, which this merge does not have."""
    if isinstance(value, dict):
        for key, inner in value.items():
            here = f"{at}.{key}" if at else key
            if key.startswith("$"):
                yield f"{here}: a merge has no directives"
            yield from directive_errors(inner, here)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from directive_errors(item, f"{at}[{index}]")


def duplicate_errors(above: object, at: str = "") -> Iterator[str]:
    """Entries of lists that a merge takes for one, because they have the same key."""
    if isinstance(above, Mapping):
        for name, value in above.items():
            here = f"{at}.{name}" if at else str(name)
            if name in MERGE_KEYS and isinstance(value, list):
                keys = [i.get(MERGE_KEYS[name]) for i in value if isinstance(i, Mapping)]
                twice = sorted({str(key) for key in keys if keys.count(key) > 1})
                yield from (f"{here}: {key} is given twice" for key in twice)
            yield from duplicate_errors(value, here)
    elif isinstance(above, list):
        for index, item in enumerate(above):
            yield from duplicate_errors(item, f"{at}[{index}]")


def is_reserved(variable: str) -> bool:
    """True if the operator sets this environment variable; given twice, a pod is refused."""
    return variable == "HOME" or variable.startswith("ETUDE_")


def variable_names(spec: Mapping[str, JsonValue], container: str) -> Iterator[str]:
    """Names of the environment variables that a part of a pod spec gives a container."""
    for each in _items(spec, "containers"):
        if each.get("name") == container:
            yield from (str(item.get("name")) for item in _items(each, "env"))


def _items(spec: Mapping[str, JsonValue], name: str) -> list[dict[str, JsonValue]]:
    found = spec.get(name)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
