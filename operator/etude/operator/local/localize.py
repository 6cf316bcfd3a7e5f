"""Localization of manifests: folders instead of buckets, and fields set on the command line."""

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, urlparse

from pydantic import JsonValue

from etude.common.api import yaml_documents
from etude.common.api.run.lifecycle import OPERATOR
from etude.common.api.yaml_documents import InvalidYamlError
from etude.common.errors import Problem, UserError

Object = dict[str, JsonValue]

_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\[\]]+)\]")


_FOR_CLUSTERS = ("ttlSecondsAfterFinished", "deletionRules")
"""Fields about the cleanup of a cluster after a run: on one host only the user's run folder stays
after the runtime."""


def localize(manifest: Object, folder: Path) -> Object:
    """The manifest with its object store and inputs in the run folder.

    A run with an S3 endpoint keeps its URIs: this host can reach that store.

    Raises:
        UserError: spec.managedBy names another manager.
    """
    spec = manifest.get("spec")
    if isinstance(spec, dict) and manifest.get("kind") == "RLRun":
        _check_manager(spec)
        spec = {key: value for key, value in spec.items() if key not in _FOR_CLUSTERS}
        manifest = {**manifest, "spec": spec}
    storage = spec.get("storage") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(storage, dict) or storage.get("endpoint"):
        return manifest
    moved = _localize_uris(spec, folder)
    assert isinstance(moved, dict), "a mapping stays one"  # noqa: S101 - our own mistake
    return {**manifest, "spec": {**moved, "storage": {**storage, "uri": _uri(folder)}}}


def localize_evaluation(evaluation: Object, run: Object, folder: Path) -> Object:
    """The evaluation with its suites in the run folder, like the inputs of the run in it."""
    spec, run_spec = evaluation["spec"], run["spec"]
    assert isinstance(run_spec, dict), "it was accepted"  # noqa: S101 - our own mistake
    storage = run_spec["storage"]
    if isinstance(storage, dict) and storage.get("endpoint"):
        return evaluation
    return {**evaluation, "spec": _localize_uris(spec, folder)}


def _check_manager(spec: Object) -> None:
    manager = spec.get("managedBy", OPERATOR)
    if manager != OPERATOR:
        what = f"spec.managedBy is {manager}: the local runtime is the only manager here"
        fix = f"remove the field, or add --set spec.managedBy={OPERATOR}"
        raise UserError(Problem("InvalidSpec", what, "spec.managedBy", fix))


def input_folder(uri: str, folder: Path) -> Path:
    """The folder in the run folder for the content of an s3:// URI."""
    parts = urlparse(uri)
    return folder / "inputs" / parts.netloc / parts.path.strip("/")


def apply_settings(manifest: Object, settings: Sequence[str]) -> Object:
    """The manifest with fields replaced: spec.phases[rl].maxSteps=3, by index or by name.

    Raises:
        UserError: a setting is not an assignment, or its path does not exist.
    """
    changed: JsonValue = manifest
    for setting in settings:
        path, separator, text = setting.partition("=")
        steps = [match[1] or match[2] for match in _STEP.finditer(path)]
        if not separator or not steps:
            raise UserError(_problem(setting, "is not an assignment"))
        changed = _set(changed, steps, text, setting)
    assert isinstance(changed, dict), "a mapping stays one"  # noqa: S101 - our own mistake
    return changed


def _localize_uris(value: JsonValue, folder: Path) -> JsonValue:
    if isinstance(value, dict):
        return {
            key: _uri(input_folder(item, folder))
            if key == "uri" and isinstance(item, str) and item.startswith("s3://")
            else _localize_uris(item, folder)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_localize_uris(item, folder) for item in value]
    return value


def _uri(folder: Path) -> str:
    return f"file://{quote(str(folder))}"


def _set(value: JsonValue, steps: Sequence[str], text: str, setting: str) -> JsonValue:
    if not steps:
        return _parse_like(value, text, setting)
    first, rest = steps[0], steps[1:]
    if isinstance(value, list):
        index = _index(value, first)
        if index is None:
            raise UserError(_problem(setting, f"has no item {first}"))
        changed = list(value)
        changed[index] = _set(value[index], rest, text, setting)
        return changed
    if value is None or isinstance(value, dict):
        before = value or {}
        return {**before, first: _set(before.get(first), rest, text, setting)}
    raise UserError(_problem(setting, f"has no field {first}"))


def _index(items: list[JsonValue], name: str) -> int | None:
    for index, item in enumerate(items):
        if str(index) == name or (isinstance(item, dict) and item.get("name") == name):
            return index
    return None


def _parse_like(before: JsonValue, text: str, setting: str) -> JsonValue:
    """The text as YAML, unless it replaces text: 1e-3 is a learning rate there, not a number.

    Raises:
        UserError: the text is not valid YAML.
    """
    if isinstance(before, str):
        return text
    try:
        found = yaml_documents.parse_documents(text.encode())
    except InvalidYamlError as cause:
        raise UserError(_problem(setting, str(cause))) from cause
    return found[0].value if found else None


def _problem(setting: str, what: str) -> Problem:
    return Problem(
        reason="Usage", what=what, where=f"--set {setting}", fix="write --set spec.path.field=value"
    )
