"""References to images in the manifests of pools and runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import JsonValue

from etude.common.api import yaml_documents
from etude.common.api.yaml_documents import InvalidYamlError
from etude.common.errors import Problem, UserError

_KINDS = ("EnvPool", "RLRun")
_FIX = "give manifests: kubectl get envp,rlr -A -o yaml > pools.yaml"


def named_images(files: Sequence[Path]) -> frozenset[str]:
    """Images that the templates of pools and runs in some files name.

    Lists are taken as `kubectl get envp,rlr -A -o yaml` prints them.

    Raises:
        UserError: a file cannot be read, or none has a pool or a run, as after a command that
            failed: it is unknown then what is in use.
    """
    found = [value for path in files for value in _documents(path)]
    if files and not any(map(_has_pool, found)):
        where = ", ".join(map(str, files))
        raise UserError(Problem("NoPools", "has no EnvPool and no RLRun", where, _FIX))
    return frozenset(image for value in found for image in _in_value(value))


def _documents(path: Path) -> list[JsonValue]:
    try:
        return [
            document.value
            for document in yaml_documents.parse_documents(yaml_documents.read_bounded(path))
        ]
    except OSError as cause:
        reason = "NotFound" if isinstance(cause, FileNotFoundError) else "Unreadable"
        what = cause.strerror or str(cause)
        raise UserError(Problem(reason, what, str(path), _FIX)) from cause
    except InvalidYamlError as cause:
        raise UserError(Problem("InvalidYaml", str(cause), str(path), _FIX)) from cause


def _has_pool(value: JsonValue) -> bool:
    if isinstance(value, list):
        return any(map(_has_pool, value))
    if not isinstance(value, dict):
        return False
    return value.get("kind") in _KINDS or _has_pool(value.get("items"))


def _in_value(value: JsonValue) -> Iterator[str]:
    """Images of all templates in a value, at any depth: a new kind around a pool hides nothing."""
    if isinstance(value, list):
        for each in value:
            yield from _in_value(each)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key == "templates" and isinstance(inner, list):
                yield from _of_templates(inner)
            yield from _in_value(inner)


def _of_templates(templates: list[JsonValue]) -> Iterator[str]:
    for template in templates:
        image = template.get("image") if isinstance(template, dict) else None
        if isinstance(image, str):
            yield image
