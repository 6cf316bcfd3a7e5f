"""What a manifest means on one machine: folders instead of buckets, and fields set by hand."""

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, urlparse

from pydantic import JsonValue

from etude.common.api import documents
from etude.common.api.documents import InvalidYamlError
from etude.common.api.lifecycle import OPERATOR
from etude.common.errors import Problem, UserError

Object = dict[str, JsonValue]

_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\[\]]+)\]")


_FOR_CLUSTERS = ("ttlSecondsAfterFinished", "deletionRules")
"""What goes from a cluster after the end of a run: on one machine everything but its folder goes
with the runtime, and the folder is the user's."""


def on_this_machine(manifest: Object, folder: Path) -> Object:
    """The manifest with its store in the run folder and its inputs below it.

    A run that names an S3 endpoint keeps its URIs: that store can be reached from here.

    Raises:
        UserError: another manager than this operator is to look after the run.
    """
    spec = manifest.get("spec")
    if isinstance(spec, dict) and manifest.get("kind") == "RLRun":
        _check_manager(spec)
        spec = {key: value for key, value in spec.items() if key not in _FOR_CLUSTERS}
        manifest = {**manifest, "spec": spec}
    storage = spec.get("storage") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(storage, dict) or storage.get("endpoint"):
        return manifest
    moved = _moved(spec, folder)
    assert isinstance(moved, dict), "a mapping stays one"  # noqa: S101 - our own mistake
    return {**manifest, "spec": {**moved, "storage": {**storage, "uri": _uri(folder)}}}


def _check_manager(spec: Object) -> None:
    manager = spec.get("managedBy", OPERATOR)
    if manager != OPERATOR:
        what = f"spec.managedBy is {manager}: on one machine nobody else looks after a run"
        fix = f"remove the field, or add --set spec.managedBy={OPERATOR}"
        raise UserError(Problem("InvalidSpec", what, "spec.managedBy", fix))


def input_folder(uri: str, folder: Path) -> Path:
    """Where the run folder holds what lies at an s3:// URI."""
    parts = urlparse(uri)
    return folder / "inputs" / parts.netloc / parts.path.strip("/")


def with_settings(manifest: Object, settings: Sequence[str]) -> Object:
    """The manifest with fields replaced: spec.phases[rl].maxSteps=3, by index or by name.

    Raises:
        UserError: a setting is no assignment, or leads nowhere.
    """
    changed: JsonValue = manifest
    for setting in settings:
        path, separator, text = setting.partition("=")
        steps = [match[1] or match[2] for match in _STEP.finditer(path)]
        if not separator or not steps:
            raise UserError(_problem(setting, "is no assignment"))
        changed = _set(changed, steps, text, setting)
    assert isinstance(changed, dict), "a mapping stays one"  # noqa: S101 - our own mistake
    return changed


def _moved(value: JsonValue, folder: Path) -> JsonValue:
    if isinstance(value, dict):
        return {
            key: _uri(input_folder(item, folder))
            if key == "uri" and isinstance(item, str) and item.startswith("s3://")
            else _moved(item, folder)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_moved(item, folder) for item in value]
    return value


def _uri(folder: Path) -> str:
    return f"file://{quote(str(folder))}"


def _set(value: JsonValue, steps: Sequence[str], text: str, setting: str) -> JsonValue:
    if not steps:
        return _like(value, text, setting)
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
    raise UserError(_problem(setting, f"has nothing below it that is called {first}"))


def _index(items: list[JsonValue], name: str) -> int | None:
    for index, item in enumerate(items):
        if str(index) == name or (isinstance(item, dict) and item.get("name") == name):
            return index
    return None


def _like(before: JsonValue, text: str, setting: str) -> JsonValue:
    """The text as YAML, unless it replaces text: 1e-3 is a learning rate there, not a number.

    Raises:
        UserError: it is no YAML.
    """
    if isinstance(before, str):
        return text
    try:
        found = documents.read(text.encode())
    except InvalidYamlError as cause:
        raise UserError(_problem(setting, str(cause))) from cause
    return found[0].value if found else None


def _problem(setting: str, what: str) -> Problem:
    return Problem(
        reason="Usage", what=what, where=f"--set {setting}", fix="write --set spec.path.field=value"
    )
