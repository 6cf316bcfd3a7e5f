"""Messages for pydantic's errors in the user's words, each with a suggested fix."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import ErrorDetails

from etude.common.api import observability
from etude.common.api.meta import (
    DECIMAL,
    MODEL_URI,
    NAME,
    OBJECT,
    BrokenRulesError,
    RepeatedError,
    Rule,
)
from etude.common.api.pool import autoscaling, images, network, placement
from etude.common.api.pool import spec as pool_spec
from etude.common.api.route import release
from etude.common.api.run import (
    curriculum,
    http_gateway,
    lifecycle,
    rewards,
    role_spec,
    rollout_policy,
    scheduling,
)
from etude.common.api.run import spec as run_spec
from etude.common.api.yaml_documents import FieldPath
from etude.common.store_urls import BASE_URL, ENDPOINT, REGION

PATTERN_DESCRIPTIONS: Mapping[str, str] = {
    NAME: "lower-case letters, digits and '-', beginning with a letter",
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$": "lower-case letters, digits and '-'",
    OBJECT: "the name of an object: lower-case letters, digits, '-' and '.'",
    scheduling.NODE_LABEL: "the key of a label, such as topology.kubernetes.io/zone",
    placement.KEY: "the key of a taint, such as nvidia.com/gpu",
    r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$": (
        "a label's value: letters, digits, '-', '_' and '.', a letter or digit at both ends"
    ),
    lifecycle.CONDITION: "the type of a pod's condition, such as DisruptionTarget",
    lifecycle.MANAGER: "a domain, a slash and a name, such as example.com/manager",
    role_spec.RESOURCE: "the name of an extended resource, such as nvidia.com/gpu",
    BASE_URL: "a URL without credentials and query, such as https://models.example.com/v1",
    DECIMAL: 'a decimal in quotes, such as "0.5" or "3e-3"',
    r"^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?$": 'a decimal in quotes, such as "-0.5" or "3e-3"',
    r"^(file|s3)://": "s3://bucket/prefix or file:///folder",
    run_spec.PRINTABLE: "printable ASCII without spaces",
    MODEL_URI: "s3://bucket/prefix, file:///folder or hf://organisation/name@revision",
    pool_spec.PREFIX: "s3://bucket/prefix or file:///folder, without spaces",
    pool_spec.SERVICE_URL: "a URL without a query, such as http://search.team:7070",
    pool_spec.IMAGE: (
        "an image that was pushed, s3://bucket/prefix/ and 32 hexadecimal digits, a folder"
        " file:///…, or the name of one on the node"
    ),
    images.REGISTRY: "a registry's host, alone or with a path, such as docker.io",
    images.SOURCE: (
        "a registry's host, alone or with a path, such as ghcr.io/acme, or a folder of layouts as"
        " file:///folder or s3://bucket/prefix"
    ),
    curriculum.CURRICULUM: (
        f"{', '.join(curriculum.PARAMETERS)}, or a name like acme.Ladder of an installed package"
    ),
    rewards.FUNCTION: (
        f"{', '.join(rewards.PARAMETERS)}, or a name like acme.Coverage of an installed package"
    ),
    rollout_policy.TOOLSET: "Standard, Compact, or a name like acme.Deploy of an installed package",
    release.LABEL: "a letter, then letters, digits, blanks, '_' and '-'",
    role_spec.IMAGE: "an image's reference, such as registry.example/etude:1.0",
    pool_spec.BACKEND: "hashed-1, minilm-l6-v2, or trained- and 16 hexadecimal digits",
    observability.COLLECTOR: "an http:// or https:// URL, such as http://collector.example:4317",
    ENDPOINT: "scheme, host and port alone, such as http://127.0.0.1:9000",
    REGION: "letters, digits and hyphens, such as eu-central-1",
    network.HOST: "a host's name, such as pypi.org or *.example.com: addresses are refused",
    http_gateway.HOST: "a host's name in lower case, such as policy.example.com or *.example.com",
    network.PATH: "a path that begins with /, without spaces and %",
    network.HEADER: "the name of an HTTP header, such as Authorization",
    network.DATA_KEY: "a key of a Secret: letters, digits, '.', '_' and '-'",
    autoscaling.CRON: "five fields of cron, such as 0 8 * * 1-5: minute, hour, day, month, weekday",
    autoscaling.TIME_ZONE: "a time zone's name, such as Europe/Berlin",
    pool_spec.CPU: 'a CPU quantity, such as "2" or 500m',
    r"^[0-9]+(Ki|Mi|Gi|Ti)?$": "a memory quantity, such as 512Mi or 4Gi",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "letters, digits and '_', beginning with no digit",
    r"^[0-9a-f]{64}$": "64 hexadecimal digits",
}


Schema = Mapping[str, Any]

MAX_SHOWN = 60
"""Characters of a value are cut to keep a problem on one line."""
FEW = 8
"""Names of a list that a problem shows, however long the list is."""

TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
}
"""The types of a schema in words."""


class FieldMessage(NamedTuple):
    """One thing wrong with one field."""

    path: FieldPath
    what: str
    fix: str
    at_key: bool = False
    """Whether the key is wrong rather than its value."""


class _Case(NamedTuple):
    """One validation error and the schema that it comes from."""

    path: FieldPath
    value: object
    node: Schema
    parent: Schema
    limits: Mapping[str, Any]
    root: Schema

    @property
    def key(self) -> str:
        return str(self.path[-1]) if self.path else ""


def field_messages(error: ErrorDetails, *, prefix: FieldPath, schema: Schema) -> list[FieldMessage]:
    """One pydantic error as one sentence, or as one for each broken rule.

    Args:
        error: an entry of `ValidationError.errors()`.
        prefix: path of the model within its document.
        schema: structural schema of the model, for what belongs where.
    """
    path = (*prefix, *error["loc"])
    limits = error.get("ctx", {})
    cause = limits.get("error")
    if isinstance(cause, BrokenRulesError):
        return [_broken(rule, path, error["input"]) for rule in cause.rules]
    if isinstance(cause, RepeatedError):
        where = (*path, cause.index, cause.key)
        return [
            FieldMessage(where, f"{dotted(where)} repeats an earlier item: {cause}", "rename it")
        ]
    if error["type"] == "too_short" and len(error["input"]) >= limits["min_length"]:
        return []  # the items are refused one by one; pydantic then counts the good ones too
    case = _Case(
        path,
        error["input"],
        _node(schema, error["loc"]),
        _node(schema, error["loc"][:-1]),
        limits,
        schema,
    )
    return [_SAY.get(error["type"], _other)(case, error["msg"])]


def _broken(rule: Rule, path: FieldPath, owner: object) -> FieldMessage:
    """A broken rule at the field that it is about, with the value that breaks it."""
    path = (*path, *filter(None, rule.field_path.split(".")))
    value = owner.get(path[-1]) if rule.field_path and isinstance(owner, dict) else None
    said = f" is {quote_value(value)}" if isinstance(value, str | int) else ""
    return FieldMessage(path, f"{dotted(path)}{said}: {rule.message}", rule.fix)


def dotted(path: FieldPath) -> str:
    """A path as kubectl writes it: spec.phases[1].name."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def abbreviate_names(names: Sequence[str]) -> str:
    """Names with commas; of very many the first ones, and how many there are."""
    first = ", ".join(names[:FEW])
    return first if len(names) <= FEW else f"{first}, … ({len(names)} in all)"


def nearest(word: str, known: Iterable[str], *, within: int = 2) -> str | None:
    """The known word that was probably meant: equal but for case, or a few edits away."""
    ranked = sorted((distance(word.lower(), other.lower()), other) for other in known)
    if ranked and ranked[0][0] <= min(within, max(len(word) // 2, 1)):
        return ranked[0][1]
    return None


def distance(one: str, other: str) -> int:
    """Insertions, deletions and replacements that turn one word into the other (Levenshtein)."""
    previous = list(range(len(other) + 1))
    for i, left in enumerate(one, start=1):
        current = [i]
        for j, right in enumerate(other, start=1):
            replaced = previous[j - 1] + (left != right)
            current.append(min(previous[j] + 1, current[-1] + 1, replaced))
        previous = current
    return previous[-1]


def quote_value(value: object) -> str:
    """A value as JSON, cut to a line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def describe_field(node: Schema) -> str:
    """Description of a field from its schema: `a whole number from 1 to 64`."""
    if "enum" in node:
        return "one of " + ", ".join(map(str, node["enum"]))
    if "properties" in node:
        needed = ", ".join(node.get("required", ()))
        return f"a mapping with {needed}" if needed else "a mapping"
    words = PATTERN_DESCRIPTIONS.get(
        node.get("pattern", ""), TYPES.get(node.get("type", ""), "a value")
    )
    low, high = node.get("minimum"), node.get("maximum")
    if low is not None and high is not None:
        return f"{words} from {low} to {high}"
    if low is not None:
        return f"{words} of at least {low}"
    return words


def _node(schema: Schema, path: Iterable[str | int]) -> Schema:
    for part in path:
        if isinstance(part, int):
            schema = schema.get("items", {})
        else:
            open_map = schema.get("additionalProperties", {})
            schema = schema.get("properties", {}).get(part, open_map)
    return schema


def _missing(case: _Case, _: str) -> FieldMessage:
    about = case.node.get("description", "").partition(". ")[0].rstrip(".").replace("\n", " ")
    fix = f"add {case.key}: {describe_field(case.node)}" + (f" ({about})" if about else "")
    return FieldMessage(case.path, f"{dotted(case.path)} is missing", fix)


def _unknown(case: _Case, _: str) -> FieldMessage:
    siblings = case.parent.get("properties", {})
    owner = dotted(case.path[:-1]) or "the object"
    what = f"{dotted(case.path)} is no field of {owner}"
    meant = nearest(case.key, siblings)
    if meant is not None:
        return FieldMessage(case.path, what, f"did you mean {meant}?", at_key=True)
    elsewhere = [path for path in _paths(case.root) if path[-1].lower() == case.key.lower()]
    if elsewhere:
        homes = " or ".join("spec." + ".".join(path) for path in elsewhere[:3])
        return FieldMessage(case.path, what, f"it belongs at {homes}", at_key=True)
    names = ", ".join(sorted(siblings))
    fix = f"remove it; {owner} has {names}" if len(names) <= 2 * MAX_SHOWN else "remove it"
    return FieldMessage(case.path, what, fix, at_key=True)


def _paths(node: Schema, at: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    """Every field path below a schema, lists shown by `[]` after their name."""
    for name, child in node.get("properties", {}).items():
        yield (*at, name)
        yield from _paths(child, (*at, name))
    if "items" in node and at:
        yield from _paths(node["items"], (*at[:-1], at[-1] + "[]"))


def _wrong_type(case: _Case, _: str) -> FieldMessage:
    wanted = describe_field(case.node)
    what = f"{dotted(case.path)} is {_kind(case.value)}, but takes {wanted}"
    return FieldMessage(case.path, what, _retyped(case, wanted))


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool() | int() | float():
            return f"{quote_value(value)} without quotes"
        case str():
            return f"the text {quote_value(value)}"
        case list() | tuple():
            return "a list"
        case _:
            return "a mapping"


def _retyped(case: _Case, wanted: str) -> str:
    """Suggested fix: the same value with the type that is wanted."""
    type_ = case.node.get("type")
    if type_ == "string" and isinstance(case.value, int | float | bool):
        return f'write {case.key}: "{quote_value(case.value)}"'
    plain = case.value.strip() if isinstance(case.value, str) else ""
    if type_ in {"integer", "number"} and plain.isdecimal():
        return f"write {case.key}: {plain}"
    if type_ == "array" and isinstance(case.value, dict):
        return f"write a list: {case.key}: [{{…}}], or '- ' before the first field"
    return f"write {case.key}: {wanted}"


def _bound(word: str, limit: str) -> Callable[[_Case, str], FieldMessage]:
    def say(case: _Case, _: str) -> FieldMessage:
        bound = case.limits[limit]
        what = f"{dotted(case.path)} is {quote_value(case.value)}; the {word} is {bound}"
        return FieldMessage(case.path, what, f"set {case.key} to {describe_field(case.node)}")

    return say


def _length(word: str, unit: str) -> Callable[[_Case, str], FieldMessage]:
    def say(case: _Case, _: str) -> FieldMessage:
        limit = case.limits["min_length" if word == "few" else "max_length"]
        size = len(case.value) if isinstance(case.value, str | list | tuple | dict) else 0
        side = "least" if word == "few" else "most"
        what = f"{dotted(case.path)} has {size} {unit}; the {side} is {limit}"
        fix = f"give at {side} {limit} {unit}"
        return FieldMessage(case.path, what, fix)

    return say


def _pattern(case: _Case, _: str) -> FieldMessage:
    pattern = str(case.limits["pattern"])
    wanted = PATTERN_DESCRIPTIONS.get(pattern, f"text that matches {pattern}")
    what = f"{dotted(case.path)} is {quote_value(case.value)}, which is not {wanted}"
    return FieldMessage(case.path, what, f"write {wanted}")


def _choice(case: _Case, _: str) -> FieldMessage:
    allowed = [str(value) for value in case.node.get("enum", ())]
    allowed = allowed or str(case.limits["expected"]).split("'")[1::2]
    what = (
        f"{dotted(case.path)} is {quote_value(case.value)}, which is none of {', '.join(allowed)}"
    )
    meant = nearest(case.value, allowed) if isinstance(case.value, str) else None
    fix = f"did you mean {meant}?" if meant else f"write one of {', '.join(allowed)}"
    return FieldMessage(case.path, what, fix)


def _other(case: _Case, message: str) -> FieldMessage:
    words = message.removeprefix("Value error, ")
    path = dotted(case.path)
    what = words if words.startswith(path) else f"{path}: {words}"
    return FieldMessage(case.path, what, f"change {case.key or dotted(case.path[:-1])}")


_SAY: Mapping[str, Callable[[_Case, str], FieldMessage]] = {
    "missing": _missing,
    "extra_forbidden": _unknown,
    **dict.fromkeys(
        (
            *("int_type", "float_type", "string_type", "bool_type", "model_type", "dict_type"),
            *("tuple_type", "list_type", "int_from_float", "model_attributes_type"),
        ),
        _wrong_type,
    ),
    "greater_than_equal": _bound("least", "ge"),
    "less_than_equal": _bound("most", "le"),
    "greater_than": _bound("exclusive lower limit", "gt"),
    "less_than": _bound("exclusive upper limit", "lt"),
    "string_too_short": _length("few", "characters"),
    "string_too_long": _length("many", "characters"),
    "too_short": _length("few", "items"),
    "too_long": _length("many", "items"),
    "string_pattern_mismatch": _pattern,
    "enum": _choice,
    "literal_error": _choice,
}
