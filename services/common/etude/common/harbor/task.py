"""Harbor task folders: reading and validation of every file.

Layout: task.toml, instruction.md, environment/ (Dockerfile and the files of the workspace),
tests/test.sh, solution/solve.sh. Of several steps each has instruction.md, tests/ (laid over the
task's), solution/ and workdir/ in steps/NAME/; the task's instruction.md is for people then.
Format: Harbor (harbor-framework/harbor), schema 1.0 to 1.4, without what needs a container engine
or a network.
"""

import json
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from blake3 import blake3
from pydantic import ValidationError

from etude.common.errors import Problem, UserError
from etude.common.harbor import task_file
from etude.common.harbor.task_file import StepSection, TaskFile
from etude.common.pinned_images import is_pinned

REWARD_PATH = "/logs/verifier/reward.txt"
"""Path of the verifier's one number inside the sandbox."""
_REWARD_JSON = "/logs/verifier/reward.json"

STEPS, WORKDIR = "steps", "workdir"
"""Folder of several steps, and in the folder of each that of what enters the workspace."""

MAX_FILE_BYTES = 4 << 20
MAX_FILES = 10_000
MAX_FOLDER_BYTES = 64 << 20
MAX_REWARD_BYTES = 64 << 10
TEST_COMMAND = (
    "mkdir -p /logs/verifier; bash /tests/test.sh; ended=$?;"
    f" if [ -e {_REWARD_JSON} ] || [ -L {_REWARD_JSON} ];"
    f" then rm -rf {REWARD_PATH}; mv {_REWARD_JSON} {REWARD_PATH}; fi; exit $ended"
)
"""As Harbor runs tests/test.sh: its folder for logs is there, and reward.json comes first."""

_TASK_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
_NUMBER = re.compile(rb"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")
_HINT = "correct the task folder; `etude tasks verify FOLDER` checks it"


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
    keeps_history: bool = False
    """True if its repository may hold more than one commit."""
    image: str = ""
    """Name of the image that it needs; empty where any will do."""
    is_graded_in_fork: bool = False
    """True if hidden tests run in a fork of the agent's sandbox and inspect its services."""
    setup: tuple[str, ...] = ()
    """Shell commands that prepare the workspace before the agent starts."""
    setup_timeout_s: float = 600.0
    """Time limit of all of them together."""
    ambiguity: float = 0.0
    """How far the instruction leaves open what is wanted, from 0 to 1."""
    protected: tuple[str, ...] = ()
    """Patterns of paths that grading takes as they were at first, beside the usual ones."""
    allowed: tuple[str, ...] = ()
    """Patterns of usually protected paths that the agent may change."""
    pytest_plugins: tuple[str, ...] | None = None
    """The only plugins that pytest loads while grading; None is all that are installed."""
    solution_env: str = ""
    """The beginning of the shell command that runs solve.sh."""
    test_folders: tuple[str, ...] = ("tests",)
    """Folders of its hidden tests; files of a later one replace those of an earlier one."""
    solution_folder: str = "solution"
    steps: tuple["TaskStep", ...] = ()
    """In order; none of a task that is one piece of work."""
    takes_final: bool = False
    """True if of several steps the last one's reward counts, not the mean."""

    @property
    def environment(self) -> Path:
        """Folder of the workspace's first files; its Dockerfile is not one of them.

        A task whose files are in an image that it names by digest may lack it.
        """
        return self.folder / "environment"

    def tests(self) -> dict[str, bytes]:
        """The hidden tests by path below /tests; of several steps those of all by step."""
        found = dict[str, bytes]()
        for name in self.test_folders:
            found |= read_files(self.folder / name)
        for step in self.steps:
            own = read_files(self.folder / STEPS / step.name / "tests")
            found |= {f"{STEPS}/{step.name}/{path}": data for path, data in own.items()}
        return found

    def solution(self) -> dict[str, bytes]:
        """The reference solution by path below solution/; empty when the task ships none."""
        found = read_files(self.folder / self.solution_folder)
        for step in self.steps:
            own = step.task.solution()
            found |= {f"{STEPS}/{step.name}/{path}": data for path, data in own.items()}
        return found

    @property
    def setup_script(self) -> str:
        """The beginning of a shell command that sets the task up first; empty without a set-up."""
        return "".join(f"( {command}\n) || exit; " for command in self.setup)

    def digest(self) -> str:
        """Identity of everything that decides a grade: first files, tests, command, time limit."""
        hasher = blake3(f"{self.command}\0{self.verifier_timeout_s}\0{self.artefacts}".encode())
        if self.is_graded_in_fork:
            hasher.update(b"\0fork")
        if self.protected or self.allowed or self.pytest_plugins is not None:
            hasher.update(f"\0{self.protected}\0{self.allowed}\0{self.pytest_plugins}".encode())
        if self.setup:
            hasher.update(f"\0setup{self.setup!r}".encode())
        for part, files in (
            ("environment", read_files(self.environment)),
            ("tests", dict(sorted(self.tests().items()))),
        ):
            for path, data in files.items():
                hasher.update(f"\0{part}/{path}\0{len(data)}\0".encode())
                hasher.update(data)
        return hasher.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStep:
    """One of several steps of a task."""

    name: str
    task: HarborTask
    """The step as a task of one piece: its instruction, hidden tests and solution."""
    min_reward: float = 0.0
    """With a lower reward the steps behind it do not count."""

    def workdir(self) -> dict[str, bytes]:
        """Files that enter the workspace before the step; setup.sh among them is then run."""
        return read_files(self.task.folder / STEPS / self.name / WORKDIR)


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
    for path in _walk(folder):
        _check_file(path)
    found = _settings(folder / "task.toml")
    # An object store holds no empty folder.
    in_image = is_pinned(found.metadata.etude_image or "")
    if not in_image and not (folder / "environment").is_dir():
        _refuse(folder / "environment", "is missing")
    task = _read_settings(folder, found)
    if found.steps:
        return replace(task, steps=tuple(_step(task, found, each) for each in found.steps))
    _check_parts(task)
    return task


def _read_settings(folder: Path, found: TaskFile) -> HarborTask:
    """The task without its steps."""
    own = found.metadata
    command = own.etude_verifier or TEST_COMMAND
    return HarborTask(
        task_id=folder.name,
        folder=folder,
        instruction=_instruction(folder / "instruction.md"),
        command=task_file.export_commands(found.verifier.env) + command,
        verifier_timeout_s=found.verifier.timeout_sec,
        artefacts=_artefacts(folder / "task.toml", found, None) if not found.steps else (),
        unknown_keys=tuple(sorted(found.unknown_keys())),
        keeps_history=own.etude_keeps_history,
        image=own.etude_image or "",
        is_graded_in_fork=own.etude_grade == "fork",
        setup=own.etude_setup,
        setup_timeout_s=own.etude_setup_timeout_sec,
        ambiguity=own.etude_ambiguity,
        protected=own.etude_protected,
        allowed=own.etude_allowed,
        pytest_plugins=own.etude_pytest_plugins,
        solution_env=task_file.export_commands(found.solution.env),
        takes_final=found.multi_step_reward_strategy == "final",
    )


def _step(task: HarborTask, found: TaskFile, step: StepSection) -> TaskStep:
    """One of several steps of a task, checked as a task is."""
    place, verifier = task.folder / STEPS / step.name, step.verifier
    command = found.metadata.etude_verifier or TEST_COMMAND
    env = found.verifier.env | verifier.env
    own = replace(
        task,
        instruction=_instruction(place / "instruction.md"),
        command=task_file.export_commands(env) + command,
        verifier_timeout_s=verifier.timeout_sec or found.verifier.timeout_sec,
        artefacts=_artefacts(task.folder / "task.toml", found, step),
        test_folders=("tests", f"{STEPS}/{step.name}/tests"),
        solution_folder=f"{STEPS}/{step.name}/solution",
    )
    _check_parts(own)
    return TaskStep(name=step.name, task=own, min_reward=step.min_reward or 0.0)


def _check_parts(task: HarborTask) -> None:
    """Check that a task, or a step of one, has scripts that bash can run."""
    folders = [task.folder / name for name in task.test_folders]
    scripts = [folder / "test.sh" for folder in folders if (folder / "test.sh").is_file()]
    _check_script(scripts[-1] if scripts else folders[-1] / "test.sh")
    solution = task.folder / task.solution_folder
    if solution.exists():
        _check_script(solution / "solve.sh")


def read_files(folder: Path) -> dict[str, bytes]:
    """Content of each regular file below a folder, by relative path with forward slashes, sorted.

    A folder that does not exist has none.

    Raises:
        UserError: a file is a link, too large or no regular file.
    """
    found = dict[str, bytes]()
    num_bytes = 0
    if not folder.exists():
        return found
    for path in sorted(_walk(folder)):
        num_bytes += _check_file(path)
        if num_bytes > MAX_FOLDER_BYTES:
            _refuse(folder, f"holds more than {MAX_FOLDER_BYTES} bytes")
        found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def parse_reward(data: bytes) -> float:
    """The one number from 0 to 1 that a reward file holds: alone, or as `{"reward": 1}`.

    Raises:
        ValueError: saying what it holds instead.
    """
    if len(data) > MAX_REWARD_BYTES:
        raise ValueError(f"the reward file is larger than {MAX_REWARD_BYTES} bytes")
    text = data if _NUMBER.fullmatch(data) else _from_object(data)
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(f"the reward {value} is not from 0 to 1")
    return value


def _from_object(data: bytes) -> str:
    """The number of the one key, or of the key "reward", as the object spells it.

    Raises:
        ValueError: there is none, or more than one.
    """
    tail = data[-200:].decode(errors="replace")
    if not data.lstrip().startswith(b"{"):
        raise ValueError(f"the reward file holds no number: {tail!r}")
    try:
        # Numbers stay text: 1e309 and 5,000 digits are refused as numbers are in reward.txt.
        pairs = json.loads(data, object_pairs_hook=list, parse_int=_Number, parse_float=_Number)
        names = [name for name, _ in pairs]
    except (ValueError, RecursionError) as cause:
        raise ValueError(f"the reward file is no JSON object: {tail!r}") from cause
    chosen = [value for name, value in pairs if name == "reward" or len(pairs) == 1]
    if len(chosen) != 1 or len({*names}) != len(names):
        raise ValueError(f"the reward file has not one reward but the keys {names[:10]}")
    for value in chosen:
        if isinstance(value, _Number):
            return value
    raise ValueError(f"the reward file holds no number: {tail!r}")


class _Number(str):
    """A number as JSON spells it."""

    __slots__ = ()


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


def _check_file(path: Path) -> int:
    """Size of a file that a task may hold."""
    status = path.lstat()
    if not path.name.isprintable():
        _refuse(path.parent, f"holds the name {path.name!r}, with control characters or no UTF-8")
    if stat.S_ISLNK(status.st_mode):
        _refuse(path, "is a symbolic link; a task holds plain files only")
    if not stat.S_ISREG(status.st_mode):
        _refuse(path, "is no regular file")
    if status.st_size > MAX_FILE_BYTES:
        _refuse(path, f"has {status.st_size} bytes, more than {MAX_FILE_BYTES}")
    return status.st_size


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


def _settings(path: Path) -> TaskFile:
    if not path.is_file():
        _refuse(path, "is missing")
    return parse_settings(path.read_bytes(), path)


def parse_settings(data: bytes, path: Path) -> TaskFile:
    """The settings in a task.toml.

    Raises:
        UserError: naming the key and the rule that it breaks.
    """
    try:
        return task_file.parse_task_file(data.decode())
    except ValidationError as cause:
        first = cause.errors()[0]
        what = first["msg"].removeprefix("Value error, ")
        _refuse(path, f"{'.'.join(str(part) for part in first['loc'])}: {what}")
    except ValueError as cause:
        _refuse(path, f"is no TOML: {cause}")


def _artefacts(path: Path, settings: TaskFile, step: StepSection | None) -> tuple[str, ...]:
    try:
        return settings.artefacts(step)
    except ValueError as cause:
        _refuse(path, str(cause))


def _refuse(path: Path, what: str) -> NoReturn:
    raise UserError(Problem(reason="InvalidTask", what=what, where=str(path), fix=_HINT))
