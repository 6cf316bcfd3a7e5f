"""Task folders in Harbor layout: read once, checked whole, bad input named.

Layout: task.toml, instruction.md, environment/ (Dockerfile beside the files of the workspace),
tests/test.sh, solution/solve.sh. Format: Harbor (harbor-framework/harbor), schema 1.0 to 1.4.
"""

import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from etude.common.errors import Problem, UserError

REWARD_PATH = "/logs/verifier/reward.txt"
"""Where a verifier leaves its one number, inside the sandbox."""

MAX_FILE_BYTES = 4 << 20
MAX_FILES = 10_000
MAX_REWARD_BYTES = 64 << 10
TEST_COMMAND = "bash /tests/test.sh"

_TASK_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
_NUMBER = re.compile(rb"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")
_HINT = "correct the task folder; `etude tasks verify FOLDER` checks it"


class _Section(BaseModel):
    """Keys that we do not know are kept, so that they can be reported."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def unknown(self, path: str) -> list[str]:
        return [f"{path}.{key}" for key in self.model_extra or ()]


class _Metadata(_Section):
    etude_verifier: str | None = Field(default=None, min_length=1, max_length=4096)
    etude_artefacts: tuple[str, ...] = ()


class _Verifier(_Section):
    timeout_sec: float = Field(default=600.0, gt=0, le=86_400, allow_inf_nan=False)


class _Agent(_Section):
    """For other harnesses: here the run limits its rollouts."""

    timeout_sec: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class _Environment(_Section):
    """Sizes are for other harnesses: here the pool decides. What no pool gives is refused."""

    build_timeout_sec: float = Field(default=600.0, gt=0)
    cpus: float = Field(default=1, gt=0)
    memory_mb: int = Field(default=2048, gt=0)
    storage_mb: int = Field(default=10_240, gt=0)
    memory: str | None = None
    storage: str | None = None
    allow_internet: Literal[False] | None = None
    network_mode: Literal["no-network"] | None = None
    gpus: Literal[0] = 0


class _TaskFile(_Section):
    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = Field(default="1.0")
    version: Literal["1.0"] | None = None
    task: dict[str, JsonValue] = Field(default_factory=dict)
    metadata: _Metadata = _Metadata()
    verifier: _Verifier = _Verifier()
    agent: _Agent = _Agent()
    environment: _Environment = _Environment()
    solution: dict[str, JsonValue] = Field(default_factory=dict)
    source: str | None = None
    steps: tuple[()] = ()

    def unknown_keys(self) -> tuple[str, ...]:
        """Keys outside of [metadata], which is free, that nothing here reads."""
        found = list(self.model_extra or ())
        for name in ("verifier", "agent", "environment"):
            found += getattr(self, name).unknown(name)
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """One task folder that passed every check."""

    task_id: str
    """The folder's name."""
    folder: Path
    instruction: str
    command: str
    """Runs the verifier inside the sandbox."""
    verifier_timeout_s: float
    artefacts: tuple[str, ...]
    """Patterns of paths that the agent may hand in; empty allows all."""
    unknown_keys: tuple[str, ...]
    """Keys of task.toml that nothing reads."""

    @property
    def environment(self) -> Path:
        """Folder of the workspace's first files, beside a Dockerfile that is not one of them."""
        return self.folder / "environment"

    def tests(self) -> dict[str, bytes]:
        """The hidden tests by path below /tests."""
        return read_files(self.folder / "tests")

    def solution(self) -> dict[str, bytes]:
        """The reference solution by path below solution/; empty when the task ships none."""
        folder = self.folder / "solution"
        return read_files(folder) if folder.exists() else {}

    def digest(self) -> str:
        """Identity of everything that decides a grade: first files, tests, command, time limit."""
        hasher = blake3(f"{self.command}\0{self.verifier_timeout_s}\0{self.artefacts}".encode())
        for part in ("environment", "tests"):
            for path, data in read_files(self.folder / part).items():
                hasher.update(f"\0{part}/{path}\0{len(data)}\0".encode())
                hasher.update(data)
        return hasher.hexdigest()


def task_folders(folder: Path) -> list[Path]:
    """The task folders of a task set, sorted by name.

    Raises:
        UserError: the folder holds no task.
    """
    if not folder.is_dir():
        _refuse(folder, "is no folder")
    found = sorted(entry for entry in folder.iterdir() if (entry / "task.toml").is_file())
    if not found:
        _refuse(folder, "holds no task: no subfolder has a task.toml")
    return found


def read_task(folder: Path) -> HarborTask:
    """The task in this folder, with everything about it checked.

    Raises:
        UserError: naming the file and the rule that it breaks.
    """
    if not _TASK_ID.match(folder.name):
        _refuse(folder, "the folder's name is no task id: use letters, digits, '.', '_' and '-'")
    for part in ("environment", "tests"):
        if not (folder / part).is_dir():
            _refuse(folder / part, "is missing")
    for path in _walk(folder):
        _check_file(path)
    settings = _settings(folder / "task.toml")
    _check_script(folder / "tests" / "test.sh")
    if (folder / "solution").exists():
        _check_script(folder / "solution" / "solve.sh")
    return HarborTask(
        task_id=folder.name,
        folder=folder,
        instruction=_instruction(folder / "instruction.md"),
        command=settings.metadata.etude_verifier or TEST_COMMAND,
        verifier_timeout_s=settings.verifier.timeout_sec,
        artefacts=settings.metadata.etude_artefacts,
        unknown_keys=settings.unknown_keys(),
    )


def read_files(folder: Path) -> dict[str, bytes]:
    """Content of each regular file below a folder, by relative path with forward slashes, sorted.

    Raises:
        UserError: a file is a link, too large or no regular file.
    """
    found = {}
    for path in sorted(_walk(folder)):
        _check_file(path)
        found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def reward(data: bytes) -> float:
    """The one number from 0 to 1 that a reward file holds.

    Raises:
        ValueError: saying what it holds instead.
    """
    if len(data) > MAX_REWARD_BYTES:
        raise ValueError(f"the reward file is larger than {MAX_REWARD_BYTES} bytes")
    if not _NUMBER.fullmatch(data):
        tail = data[-200:].decode(errors="replace")
        raise ValueError(f"the reward file holds no number: {tail!r}")
    value = float(data)
    if not 0 <= value <= 1:
        raise ValueError(f"the reward {value} is not from 0 to 1")
    return value


def _walk(folder: Path) -> Iterator[Path]:
    count = 0
    pending = [folder]
    while pending:
        for entry in sorted(pending.pop().iterdir()):
            count += 1
            if count > MAX_FILES:
                _refuse(folder, f"holds more than {MAX_FILES} files")
            if entry.is_dir() and not entry.is_symlink():
                pending.append(entry)
            else:
                yield entry


def _check_file(path: Path) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        _refuse(path, "is a symbolic link; a task holds plain files only")
    if not stat.S_ISREG(status.st_mode):
        _refuse(path, "is no regular file")
    if status.st_size > MAX_FILE_BYTES:
        _refuse(path, f"has {status.st_size} bytes, more than {MAX_FILE_BYTES}")


def _check_script(path: Path) -> None:
    if not path.is_file():
        _refuse(path, "is missing")
    if b"\r\n" in path.read_bytes():
        _refuse(path, "has CRLF line ends, which bash does not run")


def _instruction(path: Path) -> str:
    if not path.is_file():
        _refuse(path, "is missing")
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as cause:
        _refuse(path, f"is not UTF-8: {cause.reason} at byte {cause.start}")
    if not text.strip():
        _refuse(path, "is empty")
    return text.strip()


def _settings(path: Path) -> _TaskFile:
    if not path.is_file():
        _refuse(path, "is missing")
    try:
        raw: Mapping[str, JsonValue] = tomllib.loads(path.read_bytes().decode())
        return _TaskFile.model_validate(raw)
    except ValidationError as cause:
        first = cause.errors()[0]
        _refuse(path, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")
    except ValueError as cause:
        _refuse(path, f"is no TOML: {cause}")


def _refuse(path: Path, what: str) -> NoReturn:
    raise UserError(Problem(reason="InvalidTask", what=what, where=str(path), fix=_HINT))
