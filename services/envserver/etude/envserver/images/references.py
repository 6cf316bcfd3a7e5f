"""Which images the manifests of pools and runs name."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import JsonValue

from etude.common.api import documents
from etude.common.api.documents import InvalidYamlError
from etude.common.errors import Problem, UserError


def named(files: Iterable[Path]) -> frozenset[str]:
    """What templates of the pools and runs in some files call their images.

    Lists are taken as `kubectl get envp,rlr -A -o yaml` prints them.

    Raises:
        UserError: a file cannot be read, so nobody knows what it names.
    """
    return frozenset(image for path in files for image in _in_file(path))


def _in_file(path: Path) -> Iterator[str]:
    try:
        found = [document.value for document in documents.read(documents.content(path))]
    except (OSError, InvalidYamlError) as cause:
        fix = "give manifests: kubectl get envp,rlr -A -o yaml > pools.yaml"
        raise UserError(Problem("InvalidYaml", str(cause), str(path), fix)) from cause
    for value in found:
        yield from _in_value(value)


def _in_value(value: JsonValue) -> Iterator[str]:
    """Every image of a template, wherever its pool stands: a new kind around it hides nothing."""
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
