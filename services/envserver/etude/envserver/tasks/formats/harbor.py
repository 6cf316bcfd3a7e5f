"""A published Harbor task as a task folder that runs here, or the rule that it breaks."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from etude.common.harbor import task
from etude.common.harbor.task_file import WORKSPACE, TaskFile
from etude.common.pinned_images import PinnedImage, is_pinned, parse_pinned
from etude.envserver.images.dockerfile_build import PublishedImage
from etude.envserver.storage.trees import File, Tree
from etude.envserver.tasks.formats import toml
from etude.envserver.tasks.formats.imported_task import ImportedTask, ImportRefusedError

_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_BUILD_FILES = frozenset({"Dockerfile", ".dockerignore"})
_SHELL = re.compile(rb"#!\s*(/usr)?/bin/(env\s+)?(ba)?sh\b")
_STEP_INSTRUCTION = re.compile(r"steps/[^/]+/instruction\.md")
_NETWORK = {"allow_internet", "network_mode", "allowed_hosts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageChoice:
    """Ways to the image of a task that names none by its digest."""

    build: Callable[[Path], PublishedImage]
    """Builds the Dockerfile of a folder, and publishes the image."""
    pin: Callable[[str], PinnedImage] | None = None
    """The digest that a registry has for an image's name; None: no registry is asked."""
    takes_files: bool = False
    """True to take environment/ as first files, whatever its Dockerfile says."""


def import_task(folder: Path, images: ImageChoice) -> ImportedTask:
    """The task in a Harbor folder.

    Args:
        folder: as it was published.
        images: where its image comes from.

    Raises:
        ImportRefusedError: naming the file and the rule that it breaks.
        UserError: its image cannot be built or found.
    """
    task_id = _task_id(folder)
    found = _files(folder)
    _refuse_services(found)
    raw = _table(found)
    notes = _without_network(raw)
    workdir = _take_key(raw, "environment", "workdir")
    image = _take_key(raw, "environment", "docker_image")
    if image is not None and (images.pin is not None or is_pinned(image)):
        pinned = parse_pinned(image) if images.pin is None else images.pin(image)
        return _import_pinned(task_id, found, raw, notes, workdir or WORKSPACE, pinned)
    if images.takes_files:
        return _import_files(task_id, found, raw, notes, workdir or WORKSPACE)
    if "environment/Dockerfile" not in found:
        what = "is missing" if image is None else f"is missing, and {image[:80]!r} is a tag"
        fix = "ask a registry with --pin, or take the files of environment/ alone with --files"
        raise ImportRefusedError("environment/Dockerfile", what, fix)
    if image is not None:
        notes.append("environment.docker_image is a tag: the Dockerfile is built, or use --pin")
    # What breaks a rule is refused before a build of minutes.
    _settings({key: value for key, value in raw.items() if key != "artifacts"}, WORKSPACE)
    built = images.build(folder / "environment")
    place = workdir or built.folder or WORKSPACE
    return _import_pinned(task_id, found, raw, notes, place, built.image)


def _import_files(
    task_id: str, found: Tree, raw: dict[str, Any], notes: list[str], folder: str
) -> ImportedTask:
    """The task whose first files are those of environment/."""
    settings = _settings(raw, folder)
    own = {path: file for path, file in found.items() if path.startswith("environment/")}
    files = _parts(found) | {
        path: file for path, file in own.items() if path.partition("/")[2] not in _BUILD_FILES
    }
    files["task.toml"] = File(_text(raw, settings, None).encode())
    notes += [f"key {key} is not known, and left out" for key in settings.unknown_keys()]
    if len(own) > len([path for path in own if path in files]):
        notes.append("its Dockerfile is not built: environment/ is the workspace as it is")
    return ImportedTask(task_id, files, tuple(notes))


def _import_pinned(
    task_id: str,
    found: Tree,
    raw: dict[str, Any],
    notes: list[str],
    folder: str,
    image: PinnedImage,
) -> ImportedTask:
    """The task whose first files are in its image: environment/ was for its build alone."""
    settings = _settings(raw, folder)
    files = _parts(found)
    files["task.toml"] = File(_text(raw, settings, str(image)).encode())
    unknown = [f"key {key} is not known, and left out" for key in settings.unknown_keys()]
    return ImportedTask(task_id, files, (*notes, *unknown, f"needs image {image}"))


def _task_id(folder: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._")
    if not name:
        raise ImportRefusedError(str(folder), "its name holds no letter or digit")
    return name[:128]


def _files(folder: Path) -> dict[str, File]:
    return {
        path: File(data, bool((folder / path).stat().st_mode & 0o100))
        for path, data in task.read_files(folder).items()
    }


def _table(found: Tree) -> dict[str, Any]:
    if "task.toml" not in found:
        raise ImportRefusedError("task.toml", "is missing")
    try:
        raw = tomllib.loads(found["task.toml"].content.decode())
    except (ValueError, RecursionError) as cause:
        raise ImportRefusedError("task.toml", f"is not TOML: {cause}") from cause
    needed = [f"steps/{step.get('name')}/instruction.md" for step in _steps(raw)]
    for name in needed or ("instruction.md", "tests/test.sh"):
        if name not in found:
            raise ImportRefusedError(name, "is missing")
    for name, file in found.items():
        is_run = name.endswith(("tests/test.sh", "solution/solve.sh", "workdir/setup.sh"))
        if is_run and file.content.startswith(b"#!") and not _SHELL.match(file.content):
            raise ImportRefusedError(name, "its first line names another program than sh and bash")
    return raw


def _without_network(raw: dict[str, Any]) -> list[str]:
    """Remove permissions to use a network; returns a note for each."""
    notes = []
    tables = {name: raw.get(name) for name in ("environment", "verifier", "agent")}
    for number, step in enumerate(_steps(raw)):
        tables |= {f"steps.{number}.{name}": step.get(name) for name in ("verifier", "agent")}
    for section, table in tables.items():
        if not isinstance(table, dict):
            continue
        for key in sorted(_NETWORK & table.keys()):
            value = table.pop(key)
            if value not in (False, "no-network", None, []):
                notes.append(f"{section}.{key} = {value!r}, but sandboxes have no network")
    return notes


def _steps(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps as they are written, of those that can be any."""
    found = raw.get("steps")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _take_key(raw: dict[str, Any], section: str, key: str) -> str | None:
    table = raw.get(section)
    value = table.pop(key, None) if isinstance(table, dict) else None
    if value is not None and not isinstance(value, str):
        raise ImportRefusedError("task.toml", f"{section}.{key}: is no text")
    return value or None


def _refuse_services(found: Tree) -> None:
    """Refuse a task of several containers.

    Raises:
        ImportRefusedError: it is one.
    """
    for name in _COMPOSE:
        if (file := found.get(f"environment/{name}")) is not None:
            named = ", ".join(_service_names(file.content)) or "none that can be read"
            what = f"describes services ({named}); an environment here is one container"
            fix = "start what the tests need in the image, in metadata.etude_setup or in a step"
            raise ImportRefusedError(f"environment/{name}", what, fix)


def _service_names(data: bytes) -> list[str]:
    """Names of the services in a compose file; none if it is damaged."""
    try:
        found = yaml.safe_load(data)
    except (yaml.YAMLError, RecursionError, ValueError):
        return []
    services = found.get("services") if isinstance(found, dict) else None
    return [str(name)[:40] for name in services][:8] if isinstance(services, dict) else []


def _parts(found: Tree) -> dict[str, File]:
    """The files that stay as they are."""
    kept = {p: f for p, f in found.items() if p.startswith(("tests/", "solution/", "steps/"))}
    return kept | {"instruction.md": found.get("instruction.md") or _join_instructions(found)}


def _join_instructions(found: Tree) -> File:
    """The instructions of all steps, for people and for judges; agents are given one at a time."""
    texts = (f.content.strip() for p, f in sorted(found.items()) if _STEP_INSTRUCTION.fullmatch(p))
    return File(b"\n\n".join(texts) + b"\n")


def _settings(raw: dict[str, Any], folder: str) -> TaskFile:
    for table in (raw, *_steps(raw)):
        artifacts = table.get("artifacts")
        if isinstance(artifacts, list):
            table["artifacts"] = [_relocate(each, folder) for each in artifacts]
    return task.parse_settings(toml.write_toml(raw).encode(), Path("task.toml"))


def _relocate(artifact: object, folder: str) -> object:
    """An artifact's source, moved to its place here."""
    if isinstance(artifact, str) and artifact.startswith(f"{folder}/"):
        return f"{WORKSPACE}/{artifact.removeprefix(f'{folder}/')}"
    if isinstance(artifact, dict) and "source" in artifact:
        return {**artifact, "source": _relocate(artifact["source"], folder)}
    return artifact


def _text(raw: Mapping[str, Any], settings: TaskFile, image: str | None) -> str:
    unknown = set(settings.unknown_keys())
    table = {
        name: _keep_known(value, unknown, f"{name}.") if isinstance(value, dict) else value
        for name, value in raw.items()
        if name not in unknown
    }
    if steps := _steps(raw):
        table["steps"] = [_known_step(step, unknown, n) for n, step in enumerate(steps)]
    if image is not None:
        table["metadata"] = {**table.get("metadata", {}), "etude_image": image}
    return toml.write_toml(table)


def _keep_known(table: Mapping[str, Any], unknown: set[str], path: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if f"{path}{name}" not in unknown}


def _known_step(step: Mapping[str, Any], unknown: set[str], number: int) -> dict[str, Any]:
    path = f"steps.{number}."
    return {
        name: _keep_known(value, unknown, f"{path}{name}.") if isinstance(value, dict) else value
        for name, value in step.items()
        if f"{path}{name}" not in unknown
    }


def find_tasks(places: Sequence[Path]) -> list[Path]:
    """The task folders among these, and in those that are sets of them.

    Raises:
        UserError: there is no task in one.
    """
    folders = list[Path]()
    for place in places:
        folders += [place] if (place / "task.toml").exists() else task.task_folders(place)
    return folders
