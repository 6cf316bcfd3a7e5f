"""The verdict of the API server and of the operator on a manifest, offline."""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, JsonValue, ValidationError

from etude.common import extensions
from etude.common.api.checkpoint.spec import CheckpointSpec
from etude.common.api.evaluation.spec import EvalRunSpec
from etude.common.api.lint.messages import (
    FieldMessage,
    dotted,
    field_messages,
    nearest,
    quote_value,
)
from etude.common.api.lint.operator_rules import pool_refusals, route_refusals, run_refusals
from etude.common.api.meta import API_VERSION, GROUP, LabelValue, Model, Name
from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.api.route.spec import PolicyRouteSpec
from etude.common.api.run import algorithms, curriculum, rewards
from etude.common.api.run.spec import RLRunSpec
from etude.common.api.schema import structural
from etude.common.api.yaml_documents import (
    FieldPath,
    FilePosition,
    InvalidYamlError,
    YamlDocument,
    parse_documents,
    read_bounded,
)
from etude.common.errors import UserError

SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


class LintFinding(NamedTuple):
    """One problem of a file: where it is, what it is, how to put it right."""

    file: str
    position: FilePosition
    field: str
    reason: str
    what: str
    fix: str

    def text(self) -> str:
        """Position, problem and suggested fix, as the terminal shows them."""
        where = f"{self.file}:{self.position.line}:{self.position.column}"
        return f"{where}  {self.what}\n  fix: {self.fix}  [{self.reason}]"


class ManifestMetadata(Model):
    """Metadata that a user may write; the rest is refused like any unknown field."""

    name: Name
    """Name of the object, from which the names of all its children are made."""
    namespace: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = (
        "default"
    )
    """Namespace of the object and its children."""
    labels: dict[str, LabelValue] = Field(default_factory=dict)
    """Labels of the object."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the object."""
    finalizers: tuple[str, ...] = ()
    """Names of parties that clean up before the object goes."""
    owner_references: tuple[dict[str, JsonValue], ...] = ()
    """Objects whose deletion deletes this one."""
    generate_name: str = ""
    """Prefix of a generated name."""
    uid: str = ""
    """Set by the API server."""
    resource_version: str = ""
    """Set by the API server."""
    creation_timestamp: str = ""
    """Set by the API server."""
    generation: int = 0
    """Set by the API server."""
    managed_fields: tuple[dict[str, JsonValue], ...] = ()
    """Set by the API server."""
    self_link: str = ""
    """Ignored by the API server."""
    deletion_timestamp: str = ""
    """Set by the API server."""
    deletion_grace_period_seconds: int = 0
    """Set by the API server."""


class CheckpointMetadata(ManifestMetadata):
    """Metadata of a Checkpoint, whose name no child is made from."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=SUBDOMAIN)]
    """Name of the object."""


class _Kind(NamedTuple):
    metadata: type[ManifestMetadata]
    spec: type[Model]
    refusals: Callable[[JsonValue], Iterator[FieldMessage]] | None = None
    """What the operator would refuse of a spec that the API server takes."""


KINDS: Mapping[str, _Kind] = {
    "RLRun": _Kind(ManifestMetadata, RLRunSpec, run_refusals),
    "Checkpoint": _Kind(CheckpointMetadata, CheckpointSpec),
    "EnvPool": _Kind(ManifestMetadata, EnvPoolSpec, pool_refusals),
    "PolicyRoute": _Kind(ManifestMetadata, PolicyRouteSpec, route_refusals),
    "EvalRun": _Kind(ManifestMetadata, EvalRunSpec),
}
TOP_LEVEL = ("apiVersion", "kind", "metadata", "spec", "status")


def lint_file(path: Path) -> list[LintFinding]:
    """Every problem of one manifest file.

    Raises:
        OSError: the file cannot be read.
    """
    return lint_bytes(read_bounded(path), name=str(path))


def lint_text(text: str, *, name: str) -> list[LintFinding]:
    """Every problem of a manifest's text, in the order of the file; name is shown before each."""
    return lint_bytes(text.encode("utf-8", errors="surrogatepass"), name=name)


def lint_bytes(data: bytes, *, name: str) -> list[LintFinding]:
    """Every problem of a manifest's bytes, in the order of the file; name is shown before each.

    Documents of other groups are left to their own tools.
    """
    try:
        documents = parse_documents(data)
    except InvalidYamlError as cause:
        problem = cause.problem
        return [LintFinding(name, problem.position, "", "InvalidYaml", problem.what, problem.fix)]
    if not documents:
        empty = FieldMessage(
            (), "the file holds no object", f"start with apiVersion: {API_VERSION}"
        )
        return [LintFinding(name, FilePosition(1, 1), "", "InvalidYaml", empty.what, empty.fix)]
    return sorted(
        (found for document in documents for found in _document(document, name)),
        key=lambda finding: finding.position,
    )


def _document(document: YamlDocument, name: str) -> Iterator[LintFinding]:
    for problem in document.problems:
        yield LintFinding(name, problem.position, "", "InvalidYaml", problem.what, problem.fix)
    value = document.value
    if not isinstance(value, dict):
        found: Iterator[tuple[str, FieldMessage]] = iter(
            [("InvalidSpec", FieldMessage((), "an object is a mapping", "start with apiVersion:"))]
        )
    else:
        found = _object(value)
    for reason, sentence in found:
        at = document.key_position if sentence.at_key else document.value_position
        yield LintFinding(
            name, at(sentence.path), dotted(sentence.path), reason, sentence.what, sentence.fix
        )


def _object(value: Mapping[str, JsonValue]) -> Iterator[tuple[str, FieldMessage]]:
    named = _named_kind(value)
    if named is None:
        return
    if isinstance(named, FieldMessage):
        yield "InvalidSpec", named
        return
    kind = KINDS[named]
    if value["apiVersion"] != API_VERSION:
        what = f"apiVersion is {quote_value(value['apiVersion'])}, but {named} is in {API_VERSION}"
        yield "InvalidSpec", FieldMessage(("apiVersion",), what, f"write apiVersion: {API_VERSION}")
    for key in value:
        if key not in TOP_LEVEL:
            meant = nearest(key, TOP_LEVEL)
            fix = f"did you mean {meant}?" if meant else "move it below spec, or remove it"
            what = f"{key} is no field of {named}"
            yield "InvalidSpec", FieldMessage((key,), what, fix, at_key=True)
    for part, model in (("metadata", kind.metadata), ("spec", kind.spec)):
        yield from (("InvalidSpec", each) for each in _part(value, part, model))
    yield from (("InvalidParameters", each) for each in _parameters(value.get("spec")))
    if kind.refusals is not None:
        yield from (("InvalidParameters", each) for each in kind.refusals(value.get("spec")))


def _named_kind(value: Mapping[str, JsonValue]) -> str | FieldMessage | None:
    """The kind if it belongs to our group, None if to another group, else a message."""
    for key in ("apiVersion", "kind"):
        if not isinstance(value.get(key), str):
            wanted = API_VERSION if key == "apiVersion" else " or ".join(KINDS)
            return FieldMessage((key,), f"{key} is missing", f"add {key}: {wanted}")
    kind = str(value["kind"])
    if kind in KINDS:
        return kind
    if str(value["apiVersion"]).partition("/")[0] != GROUP:
        return None
    what = f"kind is {quote_value(kind)}, which is none of {', '.join(KINDS)}"
    meant = nearest(kind, KINDS)
    return FieldMessage(
        ("kind",), what, f"did you mean {meant}?" if meant else f"write {API_VERSION}"
    )


def _part(value: Mapping[str, JsonValue], part: str, model: type[Model]) -> Iterator[FieldMessage]:
    content = value.get(part)
    if content is None:
        yield FieldMessage((part,), f"{part} is missing", f"add {part}: with {_required(model)}")
        return
    yield from _refused(model, content, (part,))


def _refused(model: type[Model], value: JsonValue, at: FieldPath) -> Iterator[FieldMessage]:
    """Validation errors of a value against a model, as strict as those of the API server."""
    try:
        model.model_validate_json(
            json.dumps(_without_nulls(value)), strict=True, by_alias=True, by_name=False
        )
    except ValidationError as cause:
        for error in cause.errors():
            yield from field_messages(error, prefix=at, schema=_schema(model))


@functools.cache
def _schema(model: type[Model]) -> dict[str, Any]:
    return structural.schema(model)


def _required(model: type[Model]) -> str:
    return ", ".join(_schema(model).get("required", ()))


def _without_nulls(value: JsonValue) -> JsonValue:
    """The value as the API server sees it: a field that is null is absent."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _parameters(spec: JsonValue) -> Iterator[FieldMessage]:
    """Errors in the parameters of algorithms and reward functions, and in toolsets of packages."""
    yield from _toolset_messages(_field(spec, "rollout"), ("spec", "rollout"))
    for i, phase in enumerate(_items(spec, "phases")):
        at_rollout = ("spec", "phases", i, "rollout")
        yield from _toolset_messages(_field(phase, "rollout"), at_rollout)
        algorithm = _field(phase, "algorithm")
        name = _field(algorithm, "name") or "DrGRPO"
        if isinstance(name, str) and name in algorithms.PARAMETERS:
            model: type[Model] = algorithms.PARAMETERS[name]
            yield from _of_owner(model, name, algorithm, ("spec", "phases", i, "algorithm"))
        yield from _curriculum_messages(_field(phase, "curriculum"), ("spec", "phases", i))
    for i, function in enumerate(_items(_field(_field(spec, "roles"), "rewards"), "functions")):
        at = ("spec", "roles", "rewards", "functions", i)
        chosen = _field(function, "function")
        name = chosen if isinstance(chosen, str) else ""
        if re.search(rewards.FUNCTION, name) and rewards.can_check(name):
            try:
                model = rewards.find_model(name)
            except ValueError as error:  # an installed package that is broken
                yield FieldMessage((*at, "function"), str(error), "mend or reinstall the package")
                continue
            yield from _of_owner(model, name, function, at)


def _curriculum_messages(chosen: JsonValue, at: FieldPath) -> Iterator[FieldMessage]:
    """Errors in the parameters of a curriculum, if its package is installed here."""
    name = _field(chosen, "name")
    if not isinstance(name, str) or not re.search(curriculum.CURRICULUM, name):
        return
    if not curriculum.can_check_curriculum(name):
        return
    try:
        model = curriculum.find_model(name)
    except ValueError as error:  # an installed package that is broken
        fix = "mend or reinstall the package"
        yield FieldMessage((*at, "curriculum", "name"), str(error), fix)
        return
    yield from _of_owner(model, name, chosen, (*at, "curriculum"))


def _toolset_messages(rollout: JsonValue, at: FieldPath) -> Iterator[FieldMessage]:
    """Errors of a toolset, or of an MCP server, of a package that is installed here."""
    name = _field(rollout, "toolset")
    if not isinstance(name, str) or not extensions.is_extension(name):
        return
    groups = (extensions.TOOLSETS, extensions.MCP_SERVERS)
    here = [group for group in groups if extensions.is_installed(group, name)]
    if len(here) > 1:
        what = f"{name} is a toolset and an MCP server"
        yield FieldMessage((*at, "toolset"), what, "give one of the two another name")
    for group in here:
        try:
            extensions.load_extension(group, name, object)
        except UserError as error:
            yield FieldMessage((*at, "toolset"), error.problem.what, error.problem.fix)


def _of_owner(
    model: type[Model], name: str, owner: JsonValue, at: FieldPath
) -> Iterator[FieldMessage]:
    given = _field(owner, "parameters")
    if not isinstance(given, dict):
        return
    outer = (*at, "parameters")
    for found in _refused(model, given, outer):
        yield _better(found, name, owner, at) if found.path[:-1] == outer else found


def _better(found: FieldMessage, name: str, owner: JsonValue, at: FieldPath) -> FieldMessage:
    """Name the owner of an unknown parameter, and the place of one that sits one level up."""
    if not found.at_key:
        return found
    key = str(found.path[-1])
    what = f"{dotted(found.path)} is no parameter of {name}"
    above = _siblings(at)
    meant = nearest(key, above)
    if meant is not None and meant != "parameters" and "did you mean" not in found.fix:
        fix = f"did you mean {meant}? It sits one level up: {dotted((*at, meant))}"
        return found._replace(what=what, fix=fix)
    return found._replace(what=what)


def _siblings(at: FieldPath) -> Sequence[str]:
    node: Mapping[str, Any] = _schema(RLRunSpec)
    for part in at[1:]:
        node = node["items"] if isinstance(part, int) else node["properties"][part]
    return list(node["properties"])


def _field(value: JsonValue, key: str) -> JsonValue:
    return value.get(key) if isinstance(value, dict) else None


def _items(value: JsonValue, key: str) -> list[JsonValue]:
    found = _field(value, key)
    return found if isinstance(found, list) else []
