"""Code that is at hand with its licence: the standard library, and the locked packages."""

import re
import sysconfig
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

TUNED = (
    *("click", "flask", "httpx", "importlib-resources", "jinja2", "requests", "starlette"),
    *("tenacity", "urllib3", "websockets", "werkzeug"),
)
"""Distributions that settings were chosen on; no model is trained with them."""
JUDGED = ("aiohttp", "jsonschema", "markdown-it-py", "networkx", "pytest", "rich", "uvicorn")
"""Distributions that nothing was trained with or chosen on: figures are about them."""
HELD_OUT = (*TUNED, *JUDGED)
STANDARD_LIBRARY = "python"
_LICENCES = re.compile(r"\b(MIT|BSD|Apache|PSF|PSFL|Python Software Foundation|ISC|HPND)\b")
_REFUSED = re.compile(r"\bA?L?GPL|\bMPL\b|Proprietary|NVIDIA|Mozilla|End User|Eclipse|EPL\b")
_SKIPPED = re.compile(r"(^|/)(tests?|testing|_?vendor(ed)?|third_?party(_files)?|site-packages)/")
_MAX_FILE_BYTES = 400 << 10


class File(NamedTuple):
    """One Python file."""

    package: str
    path: str
    text: str


def training_files() -> Iterator[File]:
    """Of the standard library and of every package under a permissive licence, but the held-out."""
    root = Path(sysconfig.get_path("stdlib"))
    yield from _files(STANDARD_LIBRARY, root, sorted(root.rglob("*.py")))
    for found in _packages():
        if _name(found) not in HELD_OUT:
            yield from _of(found)


def held_out_files() -> Iterator[File]:
    """Of the packages that are the test."""
    for found in _packages():
        if _name(found) in HELD_OUT:
            yield from _of(found)


def licence(found: Distribution) -> str:
    """What a distribution says of its licence, all of it."""
    metadata = found.metadata
    said = [*(metadata.get_all("License-Expression") or []), *(metadata.get_all("License") or [])]
    said += [v for v in metadata.get_all("Classifier") or [] if v.startswith("License ::")]
    return "\n".join(line for value in said for line in value.splitlines()[:1])


def _packages() -> list[Distribution]:
    allowed = {
        _name(found): found
        for found in distributions()
        if _LICENCES.search(licence(found)) and not _REFUSED.search(licence(found))
    }
    return [allowed[name] for name in sorted(allowed) if name != "etude"]


def _name(found: Distribution) -> str:
    return re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()


def _of(found: Distribution) -> Iterator[File]:
    paths = [Path(str(found.locate_file(path))) for path in found.files or []]
    root = Path(str(found.locate_file("")))
    yield from _files(_name(found), root, sorted(p for p in paths if p.suffix == ".py"))


def _files(package: str, root: Path, paths: list[Path]) -> Iterator[File]:
    for path in paths:
        if not path.is_file() or not path.is_relative_to(root):
            continue
        name = path.relative_to(root).as_posix()
        if _SKIPPED.search(name) or path.stat().st_size > _MAX_FILE_BYTES:
            continue
        try:
            yield File(package, name, path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
