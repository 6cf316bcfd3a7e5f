"""Interpreter of Dockerfiles, as steps over a base: the subset that needs no container engine."""

import json
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from etude.envserver.storage.trees import File, Tree
from etude.envserver.tasks.formats.dockerfile import Instruction, expand_variables, instructions
from etude.envserver.tasks.formats.imported_task import ImportRefusedError

_NO_EFFECT = {"LABEL", "MAINTAINER", "EXPOSE", "CMD", "STOPSIGNAL"}
"""CMD too: a task's container waits for commands, and nothing is published."""
_WHY_NOT = {
    "ADD": "copy files of environment/ with COPY; nothing is downloaded or unpacked",
    "ENTRYPOINT": "an environment has no process of its own",
    "HEALTHCHECK": "an environment has no service",
    "ONBUILD": "no image is built on this one",
    "SHELL": "commands run in /bin/sh",
    "USER": "commands run as the sandbox's own user; setup runs as root",
    "VOLUME": "an environment has no volumes",
}
_BUILD_ONLY = re.compile(
    r"DEBIAN_FRONTEND|(PIP|UV|APT|NPM_CONFIG)_\w+|PYTHON(UNBUFFERED|DONTWRITEBYTECODE|UTF8)"
    r"|LANG|LANGUAGE|LC_\w+|TZ"
)
"""Variables that builds need, and that no command of an agent misses."""
_MACHINE_FILES = ("Dockerfile", "dockerfile", ".dockerignore")


class Copy(NamedTuple):
    """Files put into the image, by absolute path."""

    line: int
    files: Mapping[str, File]


class Run(NamedTuple):
    """A command of the build."""

    line: int
    script: str
    """For /bin/sh, with its folder and variables set."""


@dataclass(slots=True)
class DockerfileRecipe:
    """The steps of a Dockerfile."""

    base: str = ""
    """Base image."""
    base_line: int = 0
    folder: str = "/"
    """Working folder of commands: the last WORKDIR."""
    steps: list[Copy | Run] = field(default_factory=list)
    folders: set[str] = field(default_factory=lambda: {"/"})
    """Every WORKDIR: a file copied there lands in it."""
    _values: dict[str, str] = field(default_factory=dict)
    """Of ENV and ARG."""

    def follow(self, found: Instruction, context: Tree) -> None:
        """Interpret one instruction.

        Raises:
            ImportRefusedError: it needs a container engine, or is not read here.
        """
        if found.word in _NO_EFFECT:
            return
        step = _STEPS.get(found.word)
        if step is None:
            raise found.refuse(_WHY_NOT.get(found.word, "is not a supported instruction"))
        if not self.base and found.word not in {"FROM", "ARG"}:
            raise found.refuse("comes before FROM")
        step(self, found, context)

    def _from(self, found: Instruction, context: Tree) -> None:
        if self.base:
            raise found.refuse("several stages are not built; name an image that holds it all")
        if found.flags.get("platform", "linux/amd64") != "linux/amd64" or found.flags.keys() - {
            "platform"
        }:
            raise found.refuse("images are linux/amd64")
        words = expand_variables(found, found.text, self._values).split()
        if len(words) not in {1, 3} or words[0] == "scratch":
            raise found.refuse("names no image to begin from")
        self.base, self.base_line = words[0], found.line

    def _arg(self, found: Instruction, context: Tree) -> None:
        name, _, default = found.text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise found.refuse("give one NAME=default")
        self._values.setdefault(
            name, expand_variables(found, "".join(_split_words(found, default)), {})
        )

    def _env(self, found: Instruction, context: Tree) -> None:
        words = _split_words(found, found.text)
        if words and "=" not in words[0]:
            words = [f"{words[0]}={' '.join(words[1:])}"]
        for word in words:
            name, _, value = word.partition("=")
            if not _BUILD_ONLY.fullmatch(name):
                raise found.refuse(f"commands of an agent see a fixed environment without {name}")
            self._values[name] = expand_variables(found, value, self._values)

    def _workdir(self, found: Instruction, context: Tree) -> None:
        path = expand_variables(found, found.text.strip("\"'"), self._values)
        if not path:
            raise found.refuse("names no folder")
        self.folder = posixpath.normpath(posixpath.join(self.folder, path))
        self.folders.add(self.folder)

    def _run(self, found: Instruction, context: Tree) -> None:
        if any(flag != "mount" or "type=cache" not in how for flag, how in found.flags.items()):
            raise found.refuse("of the flags of RUN only --mount=type=cache is read")
        words = _listed(found)
        command = shlex.join(words) if words is not None else found.text
        if not command:
            raise found.refuse("names no command")
        values = "".join(f"export {n}={shlex.quote(v)}\n" for n, v in self._values.items())
        # A shell of its own: `a; b` goes on after a failed a, which a setup step does not.
        folder = shlex.quote(self.folder)
        script = f"{values}mkdir -p {folder}\ncd {folder}\n/bin/sh -c {shlex.quote(command)}\n"
        self.steps.append(Run(found.line, script))

    def _copy(self, found: Instruction, context: Tree) -> None:
        if found.flags.keys() - {"chmod", "link"}:
            raise found.refuse("of the flags of COPY only --chmod and --link are read")
        words = _listed(found) or _split_words(found, found.text)
        words = [expand_variables(found, word, self._values) for word in words]
        if len(words) < 2:
            raise found.refuse("names no source and destination")
        *sources, target = words
        is_folder = len(sources) > 1 or target.endswith(("/", "/.")) or target == "."
        path = posixpath.normpath(posixpath.join(self.folder, target))
        files = dict[str, File]()
        for source in sources:
            files |= self._copied_files(found, context, source, path, is_folder=is_folder)
        mode = found.flags.get("chmod")
        if mode is not None:
            if not re.fullmatch(r"[0-7]{3,4}", mode):
                raise found.refuse("give --chmod as an octal number")
            files = {p: f._replace(executable=bool(int(mode, 8) & 0o100)) for p, f in files.items()}
        self.steps.append(Copy(found.line, files))

    def _copied_files(
        self, found: Instruction, context: Tree, source: str, target: str, *, is_folder: bool
    ) -> dict[str, File]:
        pattern = posixpath.normpath(source).lstrip("/")
        if ".." in pattern.split("/"):
            raise found.refuse(f"{source!r} leaves environment/")
        if pattern in {".", ""}:
            return {posixpath.join(target, path): file for path, file in context.items()}
        taken = dict[str, File]()
        for path, file in context.items():
            head, rest = _split(path, pattern.count("/") + 1)
            if not fnmatchcase(head, pattern):
                continue
            inside = rest or (posixpath.basename(path) if self._lands_in(target, is_folder) else "")
            taken[posixpath.join(target, inside) if inside else target] = file
        if not taken:
            raise found.refuse(f"environment/ holds no {source!r}")
        return taken

    def _lands_in(self, target: str, is_folder: bool) -> bool:  # noqa: FBT001 - private
        return is_folder or target in self.folders


_STEPS: Mapping[str, Callable[[DockerfileRecipe, Instruction, Tree], None]] = {
    "FROM": DockerfileRecipe._from,
    "ARG": DockerfileRecipe._arg,
    "ENV": DockerfileRecipe._env,
    "WORKDIR": DockerfileRecipe._workdir,
    "RUN": DockerfileRecipe._run,
    "COPY": DockerfileRecipe._copy,
}


def follow_dockerfile(text: str, context: Tree) -> DockerfileRecipe:
    """Interpret a Dockerfile.

    Args:
        text: of the Dockerfile.
        context: the files next to it.

    Raises:
        ImportRefusedError: a line needs a container engine, or is not read here.
    """
    recipe = DockerfileRecipe()
    files = {path: file for path, file in context.items() if path not in _MACHINE_FILES}
    for found in instructions(text):
        recipe.follow(found, files)
    if not recipe.base:
        raise ImportRefusedError("environment/Dockerfile", "has no FROM")
    return recipe


def _listed(found: Instruction) -> list[str] | None:
    """The words of the form `["a", "b"]`; None for the other form."""
    if not found.text.startswith("["):
        return None
    try:
        words = json.loads(found.text)
    except (ValueError, RecursionError):
        return None
    return words if isinstance(words, list) and all(isinstance(w, str) for w in words) else None


def _split_words(found: Instruction, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as cause:
        raise found.refuse(f"quotes: {cause}") from cause


def _split(path: str, depth: int) -> tuple[str, str]:
    parts = path.split("/")
    return "/".join(parts[:depth]), "/".join(parts[depth:])
