"""What of a CustomResourceDefinition a later one no longer takes, keeps or means: the upgrade rule.

The rule is written for people in docs/how-to/upgrade.md.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Node = Mapping[str, Any]

AT_LEAST = ("minimum", "minLength", "minItems", "minProperties")
AT_MOST = ("maximum", "maxLength", "maxItems", "maxProperties")
SAME = (
    *("type", "format", "pattern", "default", "exclusiveMinimum", "exclusiveMaximum"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-int-or-string"),
    *("x-kubernetes-map-type",),
)
RULES = "x-kubernetes-validations"
OPEN = "x-kubernetes-preserve-unknown-fields"


def breaks(before: Node, after: Node) -> Iterator[str]:
    """Everything that objects, clients or tools of the earlier definition would trip over."""
    yield from _of_names(before["spec"], after["spec"])
    later = {version["name"]: version for version in after["spec"]["versions"]}
    for version in before["spec"]["versions"]:
        name = version["name"]
        if name not in later or not later[name]["served"]:
            yield f"{name}: is not served any more"
            continue
        yield from _of_version(name, version, later[name])


def _of_names(before: Node, after: Node) -> Iterator[str]:
    for field in ("group", "scope"):
        if before[field] != after[field]:
            yield f"{field}: {before[field]} became {after[field]}"
    for field in ("kind", "plural", "singular", "listKind"):
        if before["names"][field] != after["names"][field]:
            yield f"names.{field}: {before['names'][field]} became {after['names'][field]}"
    for field in ("shortNames", "categories"):
        for gone in set(before["names"][field]) - set(after["names"][field]):
            yield f"names.{field}: {gone} is gone"


def _of_version(name: str, before: Node, after: Node) -> Iterator[str]:
    for gone in set(before["subresources"]) - set(after["subresources"]):
        yield f"{name}.subresources: {gone} is gone"
    scale = before["subresources"].get("scale")
    if scale is not None and after["subresources"].get("scale", scale) != scale:
        yield f"{name}.subresources.scale: its paths changed"
    known = {each["jsonPath"] for each in after.get("selectableFields", ())}
    for each in before.get("selectableFields", ()):
        if each["jsonPath"] not in known:
            yield f"{name}.selectableFields: {each['jsonPath']} is gone"
    yield from narrowed(
        before["schema"]["openAPIV3Schema"], after["schema"]["openAPIV3Schema"], name
    )


def narrowed(before: Node, after: Node, path: str) -> Iterator[str]:
    """Everything below a place that the earlier schema takes and the later one does not."""
    yield from _of_values(before, after, path)
    yield from _of_rules(before, after, path)
    if before.get(OPEN) and not after.get(OPEN):
        yield f"{path}: fields that it does not know are dropped now"
    yield from _of_fields(before, after, path)
    for part, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if part in before and part in after:
            yield from narrowed(before[part], after[part], f"{path}{mark}")
        elif part in before:
            yield f"{path}: {part} is gone"


def _of_values(before: Node, after: Node, path: str) -> Iterator[str]:
    for field in SAME:
        was, now = before.get(field), after.get(field)
        is_wider = field in {"pattern", "exclusiveMinimum", "exclusiveMaximum"} and not now
        if was != now and not is_wider:
            yield f"{path}: {field} was {was} and is {now}"
    for field in (*AT_LEAST, *AT_MOST):
        if field not in after:
            continue
        was, now = before.get(field), after[field]
        if was is None or (now > was if field in AT_LEAST else now < was):
            yield f"{path}: {field} was {was} and is {now}"
    for gone in [each for each in before.get("enum", ()) if each not in after.get("enum", [each])]:
        yield f"{path}: {gone} is no value any more"
    if "enum" in after and "enum" not in before:
        yield f"{path}: only {after['enum']} are values now"


def _of_rules(before: Node, after: Node, path: str) -> Iterator[str]:
    known = {rule["rule"] for rule in before.get(RULES, ())}
    for rule in after.get(RULES, ()):
        if rule["rule"] not in known:
            yield f"{path}: a new rule: {rule['rule']}"


def _of_fields(before: Node, after: Node, path: str) -> Iterator[str]:
    fields, later = before.get("properties", {}), after.get("properties", {})
    for name, node in fields.items():
        if name in later:
            yield from narrowed(node, later[name], f"{path}.{name}")
        else:
            yield f"{path}.{name}: is gone"
    for name in set(after.get("required", ())) - set(before.get("required", ())):
        if name not in later or "default" not in later[name]:
            yield f"{path}.{name}: is required now"
