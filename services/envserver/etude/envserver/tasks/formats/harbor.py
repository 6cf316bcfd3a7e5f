"""A published Harbor task as a task folder that runs here, or the rule that it breaks."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.common.harbor import task
from etude.common.harbor.task_file import WORKSPACE, TaskFile
from etude.common.pinned_images import PinnedImage, is_pinned, parse_pinned
from etude.envserver.storage.trees import File, Tree
from etude.envserver.tasks.formats import dockerfile_recipe, task_image, toml
from etude.envserver.tasks.formats.imported_task import ImportedTask, ImportRefusedError
from etude.envserver.tasks.formats.task_image import OciLayout, TaskImage

_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_SHELL = re.compile(rb"#!\s*(/usr)?/bin/(env\s+)?(ba)?sh\b")
_NETWORK = {"allow_internet", "network_mode", "allowed_hosts"}


Pin = Callable[[str], PinnedImage]
"""The digest that a registry has for an image's name."""
Build = Callable[[Path], PinnedImage]
"""Builds the Dockerfile of a folder, and publishes the image."""


def import_task(
    folder: Path,
    layouts: Mapping[str, OciLayout],
    pin: Pin | None = None,
    build: Build | None = None,
) -> ImportedTask:
    """The task in a Harbor folder.

    Args:
        folder: as it was published.
        layouts: OCI layouts on this machine by the name of the image that they hold.
        pin: asks a registry; None: an image is taken by its digest only.
        build: builds the Dockerfile; None: it is read, and becomes first files and an image spec.

    Raises:
        UserError: naming the file and the rule that it breaks.
    """
    task_id = _task_id(folder)
    found = _files(folder)
    raw = _table(found)
    notes = _without_network(raw)
    workdir = _take_key(raw, "environment", "workdir")
    image = _take_key(raw, "environment", "docker_image")
    if image is not None and (pin is not None or is_pinned(image)):
        pinned = parse_pinned(image) if pin is None else pin(image)
        return _import_pinned(task_id, found, raw, notes, workdir or WORKSPACE, pinned)
    if build is not None and "environment/Dockerfile" in found:
        pinned = build(folder / "environment")
        return _import_pinned(task_id, found, raw, notes, workdir or WORKSPACE, pinned)
    if image is not None:
        notes.append("environment.docker_image is a tag: the Dockerfile is followed, or use --pin")
    context = {
        path.removeprefix("environment/"): file
        for path, file in found.items()
        if path.startswith("environment/")
    }
    made = _machine(context, workdir, _image_name(task_id), layouts)
    files = _parts(found)
    files |= {f"environment/{path}": file for path, file in made.workspace.items()}
    settings = _settings(raw, made.folder)
    notes += [f"key {key} is not known, and left out" for key in settings.unknown_keys()]
    if made.is_needed:
        notes.append(f"needs its image: etude images build {task_id}/image.yaml")
    files["image.yaml"] = File(task_image.spec_text(made.spec).encode())
    name = made.spec.name if made.is_needed else None
    files["task.toml"] = File(_text(raw, settings, name).encode())
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


def _image_name(task_id: str) -> str:
    """A name for pools: short, in small letters."""
    name = re.sub(r"[^a-z0-9]+", "-", task_id.lower()).strip("-")
    return f"task-{name}"[:40].rstrip("-")


def _files(folder: Path) -> dict[str, File]:
    return {
        path: File(data, bool((folder / path).stat().st_mode & 0o100))
        for path, data in task.read_files(folder).items()
    }


def _table(found: Tree) -> dict[str, Any]:
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if name not in found:
            steps = " (tasks of several steps are not read)" if name != "task.toml" else ""
            raise ImportRefusedError(name, f"is missing{steps}")
    for name in ("tests/test.sh", "solution/solve.sh"):
        data = found[name].content if name in found else b""
        if data.startswith(b"#!") and not _SHELL.match(data):
            raise ImportRefusedError(name, "its first line names another program than sh and bash")
    try:
        return tomllib.loads(found["task.toml"].content.decode())
    except (ValueError, RecursionError) as cause:
        raise ImportRefusedError("task.toml", f"is not TOML: {cause}") from cause


def _without_network(raw: dict[str, Any]) -> list[str]:
    """Remove permissions to use a network; returns a note for each."""
    notes = []
    for section in ("environment", "verifier", "agent"):
        table = raw.get(section)
        if not isinstance(table, dict):
            continue
        for key in sorted(_NETWORK & table.keys()):
            value = table.pop(key)
            if value not in (False, "no-network", None, []):
                notes.append(f"{section}.{key} = {value!r}, but sandboxes have no network")
    return notes


def _take_key(raw: dict[str, Any], section: str, key: str) -> str | None:
    table = raw.get(section)
    value = table.pop(key, None) if isinstance(table, dict) else None
    if value is not None and not isinstance(value, str):
        raise ImportRefusedError("task.toml", f"{section}.{key}: is no text")
    return value or None


def _machine(
    context: Tree, workdir: str | None, name: str, layouts: Mapping[str, OciLayout]
) -> TaskImage:
    compose = [path for path in _COMPOSE if path in context]
    if compose:
        raise ImportRefusedError(
            f"environment/{compose[0]}", "describes several services; only one container is run"
        )
    if context.get(".dockerignore", File(b"")).content.strip():
        raise ImportRefusedError(
            "environment/.dockerignore", "is not read; remove what it leaves out"
        )
    dockerfile = context.get("Dockerfile")
    if dockerfile is None:
        raise ImportRefusedError(
            "environment/Dockerfile", "is missing; no image is pulled instead of it"
        )
    followed = dockerfile_recipe.follow_dockerfile(
        dockerfile.content.decode(errors="replace"), context
    )
    if workdir is not None:
        followed.folder = workdir
    return task_image.make_task_image(followed, name, layouts)


def _parts(found: Tree) -> dict[str, File]:
    """The files that stay as they are."""
    kept = {"instruction.md": found["instruction.md"]}
    return kept | {p: f for p, f in found.items() if p.startswith(("tests/", "solution/"))}


def _settings(raw: dict[str, Any], folder: str) -> TaskFile:
    artifacts = raw.get("artifacts")
    if isinstance(artifacts, list):
        raw["artifacts"] = [_relocate(each, folder) for each in artifacts]
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
    if image is not None:
        table["metadata"] = {**table.get("metadata", {}), "etude_image": image}
    return toml.write_toml(table)


def _keep_known(table: Mapping[str, Any], unknown: set[str], path: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if f"{path}{name}" not in unknown}


def find_tasks(places: Sequence[Path]) -> list[Path]:
    """The task folders among these, and in those that are sets of them.

    Raises:
        UserError: there is no task in one.
    """
    folders = list[Path]()
    for place in places:
        folders += [place] if (place / "task.toml").exists() else task.task_folders(place)
    return folders
