"""Tasks of simulated users: what a user asks for, has, and in truth wants."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from etude.common.errors import Problem, UserError

_FILES, _WANTED = Path("environment"), Path("solution") / "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTask:
    """One piece of work."""

    name: str
    instruction: str
    """The user's first message."""
    files: Mapping[str, bytes]
    """The user's folder before the work, by path."""
    wanted: Mapping[str, bytes]
    """Files as the user wants them in the end. Only the user knows."""

    def is_done(self, files: Mapping[str, bytes]) -> bool:
        """True if a folder is what the user wants: the wanted files, and no other change."""
        return all(
            _normalize(files.get(path, b"")) == _normalize(self.wanted.get(path, data))
            for path, data in self.files.items()
        )


def _normalize(data: bytes) -> list[bytes]:
    return [line.rstrip() for line in data.rstrip().split(b"\n")]


def read_task(folder: Path) -> UserTask:
    """Read a generated task folder in Harbor layout.

    Raises:
        UserError: the folder lacks an instruction, files, or the wanted ones.
    """
    try:
        instruction = (folder / "instruction.md").read_text("utf-8").strip()
        files = _read_files(folder / _FILES)
        wanted = _read_files(folder / _WANTED)
    except (OSError, UnicodeDecodeError) as error:
        _refuse(folder, str(error), error)
    files.pop("Dockerfile", None)
    if not instruction or not files or not wanted.keys() & files.keys():
        _refuse(folder, "has no instruction, no files, or no solution for them")
    return UserTask(name=folder.name, instruction=instruction, files=files, wanted=wanted)


def read_tasks(folder: Path) -> list[UserTask]:
    """Read all task folders below one, by name.

    Raises:
        UserError: there is none, or one cannot be read.
    """
    folders = sorted(path.parent for path in folder.glob("*/task.toml"))
    if not folders:
        _refuse(folder, "holds no task folders")
    return [read_task(each) for each in folders]


def _read_files(root: Path) -> dict[str, bytes]:
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def _refuse(folder: Path, what: str, cause: Exception | None = None) -> NoReturn:
    fix = "generate tasks: python -m etude.demo.generate --out DIR"
    raise UserError(Problem("InvalidTask", what, str(folder), fix)) from cause
