"""Image spec and first files of a task, made from its Dockerfile."""

import base64
import hashlib
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import yaml
from pydantic import ValidationError

from etude.common.harbor.task_file import WORKSPACE
from etude.envserver.images.spec import (
    MAX_SPEC_BYTES,
    DebianBase,
    ImageBase,
    ImageFile,
    ImageSpec,
    OciBase,
    SetupStep,
)
from etude.envserver.storage.trees import File
from etude.envserver.tasks.formats.dockerfile_recipe import Copy, DockerfileRecipe, Run
from etude.envserver.tasks.formats.imported_task import ImportRefusedError

_DOCKERFILE = "environment/Dockerfile"
_CONTEXT = "/opt/etude-context"
"""Folder for the files of COPY while the image is built."""
_SYSTEM = frozenset({"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "root", "run", "sbin"})
_SYSTEM_TOO = frozenset({"sys", "tmp", "usr", "var", "tests", "logs", "workspace", "home", "opt"})
_DEBIAN = re.compile(
    r"(?:docker\.io/)?(?:library/)?debian:(bookworm|trixie|12|13)(?:[.\d]*)(-slim)?"
)
_PYTHON = re.compile(
    r"(?:docker\.io/)?(?:library/)?python:(3\.11|3\.13)(?:\.\d+)?(-slim)?(?:-(bookworm|trixie))?"
)
_SUITES = {"12": "bookworm", "13": "trixie", "3.11": "bookworm", "3.13": "trixie"}
_TOOLS = ("python3", "git", "ripgrep", "ca-certificates")
_LIKE_PYTHON = """\
ln -sf /usr/bin/python3 /usr/local/bin/python
ln -sf /usr/bin/pip3 /usr/local/bin/pip
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
"""
_LINK = """\
if [ -d {folder} ] && [ ! -L {folder} ]; then rmdir {folder}; fi
mkdir -p {parent} {workspace}
ln -s {workspace} {folder}
"""
_PROVE = f"""\
cd {WORKSPACE}
find . ! -type d -print0 | LC_ALL=C sort -z | xargs -0r sha256sum > /tmp/found
if ! diff {_CONTEXT}/workspace /tmp/found; then
  echo "a RUN changed the workspace: let the task ship the files as they are then"
  exit 1
fi
find {WORKSPACE} -mindepth 1 -delete
rm -rf {_CONTEXT} /tmp/found
"""


class OciLayout(NamedTuple):
    """The name of an OCI layout on this machine, for an image that a Dockerfile names."""

    folder: str
    digest: str


class TaskImage(NamedTuple):
    """Image and workspace of a task."""

    workspace: dict[str, File]
    """The first files, by path in the workspace."""
    folder: str
    """The author's folder of the workspace; in the image it is a link to /workspace."""
    spec: ImageSpec
    is_needed: bool
    """True if the task relies on more than its workspace, Python and the usual programs."""


def make_task_image(
    recipe: DockerfileRecipe, name: str, layouts: Mapping[str, OciLayout]
) -> TaskImage:
    """Make image and workspace from a recipe.

    Args:
        recipe: a Dockerfile that was followed.
        name: of the image.
        layouts: OCI layouts by the name of the image that they hold.

    Raises:
        ImportRefusedError: the base is unknown, or the recipe needs more than a spec can say.
    """
    _check_folder(recipe.folder)
    base, setup = _base(recipe, layouts)
    workspace = dict[str, File]()
    for step in recipe.steps:
        if isinstance(step, Copy):
            workspace |= _inside(step.files, recipe.folder)
    is_built = any(_is_built(step, recipe.folder) for step in recipe.steps)
    is_needed = is_built or recipe.folder != WORKSPACE or base.oci is not None
    files = dict[str, str]()
    if recipe.folder != WORKSPACE:
        setup.append(SetupStep(run=_link(recipe.folder)))
    if is_built:
        files, steps = _built(recipe)
        files[f"{_CONTEXT}/workspace"] = _sums(workspace)
        setup += [*steps, SetupStep(run=_PROVE)]
    spec = _spec(name, base, files, setup)
    return TaskImage(workspace, recipe.folder, spec, is_needed)


def _spec(
    name: str, base: ImageBase, files: Mapping[str, str], setup: list[SetupStep]
) -> ImageSpec:
    try:
        made = ImageSpec(
            name=name,
            base=base,
            files=tuple(ImageFile(path=path, text=content) for path, content in files.items()),
            setup=tuple(setup),
        )
        if len(spec_text(made)) <= MAX_SPEC_BYTES:
            return made
        what = f"makes an image spec of more than {MAX_SPEC_BYTES} bytes"
    except ValidationError as cause:
        what = f"makes no image spec: {cause.errors()[0]['msg']}"
    raise ImportRefusedError(
        _DOCKERFILE, what, "join RUN lines; COPY large files after the last RUN"
    )


def spec_text(spec: ImageSpec) -> str:
    """The spec as `etude images build` reads it."""
    return yaml.safe_dump(spec.to_json(), sort_keys=False, allow_unicode=True)


def _check_folder(folder: str) -> None:
    top = folder.split("/")[1:]
    if folder == "/":
        what = "names no WORKDIR, so nothing says where the workspace is"
        raise ImportRefusedError(_DOCKERFILE, what, "add WORKDIR /workspace")
    is_system = top[0] in _SYSTEM or (len(top) == 1 and top[0] in _SYSTEM_TOO)
    is_below = folder.startswith((f"{WORKSPACE}/", "/tests/", "/logs/"))
    if folder != WORKSPACE and (is_system or is_below):
        raise ImportRefusedError(_DOCKERFILE, f"its workspace {folder} belongs to the system")


def _base(
    recipe: DockerfileRecipe, layouts: Mapping[str, OciLayout]
) -> tuple[ImageBase, list[SetupStep]]:
    if (layout := layouts.get(recipe.base)) is not None:
        return ImageBase(oci=OciBase(layout=layout.folder, digest=layout.digest)), []
    if match := _DEBIAN.fullmatch(recipe.base):
        suite = _SUITES.get(match[1], match[1])
        return ImageBase(debian=DebianBase(suite=suite, packages=_TOOLS)), []
    if match := _PYTHON.fullmatch(recipe.base):
        suite = _SUITES[match[1]]
        if match[3] in {None, suite}:
            packages = (*_TOOLS, "python3-pip", "python3-venv")
            return ImageBase(debian=DebianBase(suite=suite, packages=packages)), [
                SetupStep(run=_LIKE_PYTHON)
            ]
    raise ImportRefusedError(
        f"{_DOCKERFILE} line {recipe.base_line}",
        f"`FROM {recipe.base[:80]}`: nothing is pulled; only debian:12, debian:13, python:3.11 and"
        " python:3.13 are made from Debian's archive",
        f"skopeo copy docker://{recipe.base[:80]} oci:FOLDER, then --oci"
        f" {recipe.base[:80]}=FOLDER@sha256:…",
    )


def _is_built(step: Copy | Run, folder: str) -> bool:
    """True if the image has to hold more than its base."""
    return isinstance(step, Run) or len(_inside(step.files, folder)) < len(step.files)


def _inside(files: Mapping[str, File], folder: str) -> dict[str, File]:
    prefix = f"{folder}/"
    return {p.removeprefix(prefix): file for p, file in files.items() if p.startswith(prefix)}


def _link(folder: str) -> str:
    quoted = shlex.quote(folder)
    parent = shlex.quote(posixpath.dirname(folder))
    return _LINK.format(folder=quoted, parent=parent, workspace=WORKSPACE)


def _built(recipe: DockerfileRecipe) -> tuple[dict[str, str], list[SetupStep]]:
    files, steps = dict[str, str](), list[SetupStep]()
    for step in recipe.steps:
        if isinstance(step, Run):
            steps.append(_setup(step.script, step.line))
            continue
        lines = list[str]()
        for path, file in step.files.items():
            name = f"{_CONTEXT}/{len(files)}"
            files[name] = base64.b64encode(file.content).decode()
            lines += _placed(name, path, executable=file.executable)
        steps += [_setup(part, step.line) for part in _parts(lines)]
    return files, steps


def _setup(script: str, line: int) -> SetupStep:
    try:
        return SetupStep(run=script, network=True)
    except ValidationError as cause:
        where = f"{_DOCKERFILE} line {line}"
        raise ImportRefusedError(where, f"is no setup step: {cause.errors()[0]['msg']}") from cause


def _placed(name: str, path: str, *, executable: bool) -> Iterator[str]:
    quoted = shlex.quote(path)
    yield f"mkdir -p {shlex.quote(posixpath.dirname(path))}"
    yield f"base64 -d < {name} > {quoted}"
    yield f"chmod {'0755' if executable else '0644'} {quoted}"


def _parts(lines: list[str]) -> Iterator[str]:
    """The lines as scripts no longer than a step may be."""
    script = ""
    for line in lines:
        if len(script) + len(line) > 60_000:
            yield script
            script = ""
        script += f"{line}\n"
    if script:
        yield script


def _sums(workspace: Mapping[str, File]) -> str:
    """As sha256sum prints them, names in the order of their bytes."""
    lines = sorted((f"./{path}".encode(), file) for path, file in workspace.items())
    return "".join(
        f"{hashlib.sha256(file.content).hexdigest()}  {path.decode()}\n" for path, file in lines
    )
