"""Rows of SWE-bench as task folders; repositories come from local mirrors, never from a network."""

import importlib.resources
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from etude.common.errors import Problem, UserError
from etude.common.harbor.grading_repairs import keep_module_path
from etude.common.pinned_images import PinnedImage
from etude.envserver.storage.trees import File
from etude.envserver.tasks.formats import git_mirror, toml
from etude.envserver.tasks.formats.git_mirror import Checkout, GitMirror, PatchChanges
from etude.envserver.tasks.formats.imported_task import ImportedTask, ImportRefusedError
from etude.envserver.tasks.formats.swebench_grader import PYTEST

MAX_ROW_BYTES = 16 << 20
TEST_COMMAND = "python3 -m pytest -rA --tb=short -p no:cacheprovider"
"""Followed by the test files that the row's test patch writes."""
TIMEOUT_S = 1_800.0
INSTANCE = "{instance}"
"""Stands for a row's id in the name of its image."""
_NOT_READ = frozenset({"hints_text", "created_at", "version", "environment_setup_commit"})
_SOLVE = """\
#!/bin/bash
set -e
{deleted}[ ! -d "$(dirname "$0")/files" ] || cp -R "$(dirname "$0")/files/." .
"""


def _listed(value: object) -> object:
    """The list in a text of JSON, as some publish it.

    Raises:
        ValueError: the text is none.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as cause:
        raise ValueError("is neither a list nor JSON") from cause


_Tests = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class SwebenchRow(BaseModel):
    """One instance of the benchmark."""

    model_config = ConfigDict(frozen=True, extra="allow")

    instance_id: Annotated[
        str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    ]
    repo: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+$")]
    base_commit: str
    problem_statement: Annotated[str, StringConstraints(min_length=1)]
    test_patch: Annotated[str, StringConstraints(min_length=1)]
    patch: str = ""
    """The gold patch; without one the task has no solution to be verified with."""
    fail_to_pass: Annotated[_Tests, Field(alias="FAIL_TO_PASS", min_length=1)]
    pass_to_pass: Annotated[_Tests, Field(alias="PASS_TO_PASS")] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SwebenchOptions:
    """Settings of an import that rows do not contain."""

    repositories: Path
    """Folder of mirrors: owner/name, owner__name, either with .git, or owner__name.bundle."""
    test_command: str = TEST_COMMAND
    image: str = ""
    """Name of the tasks' image; `{instance}` in it stands for the id as in SWE-bench's names."""
    pin: Callable[[str], PinnedImage] | None = None
    """Asks a registry for the image's digest; None: the name is one of a pool's template."""
    timeout_s: float = TIMEOUT_S


@dataclass(slots=True)
class SwebenchImporter:
    """Makes tasks of rows; each mirror is opened once."""

    options: SwebenchOptions
    scratch: Path
    _mirrors: dict[str, GitMirror] = field(default_factory=dict)

    def import_row(self, row: SwebenchRow) -> ImportedTask:
        """The task of a row.

        Raises:
            UserError: its repository lacks the commit, or a patch does not apply.
        """
        mirror = self._mirror(row.repo)
        checkout = self._checkout(mirror, row.base_commit)
        tests = mirror.changes(row.base_commit, row.test_patch, "test_patch")
        gold = mirror.changes(row.base_commit, row.patch, "patch")
        files = {f"environment/{path}": file for path, file in checkout.files.items()}
        files |= self._tests(row, tests)
        if row.patch:
            files |= _solution(row, gold)
        files["instruction.md"] = File(row.problem_statement.strip().encode() + b"\n")
        files["task.toml"] = File(self._settings(row).encode())
        return ImportedTask(row.instance_id, files, (*_notes(row), *_left_out(checkout.left_out)))

    def _checkout(self, mirror: GitMirror, commit: str) -> Checkout:
        """The files of a commit; none where each row has an image by digest, which holds them."""
        if self.options.pin is not None and INSTANCE in self.options.image:
            mirror.check_commit(commit)
            return Checkout({}, ())
        return mirror.checkout(commit)

    def _mirror(self, repo: str) -> GitMirror:
        if repo not in self._mirrors:
            folder = self.scratch / str(len(self._mirrors))
            self._mirrors[repo] = git_mirror.open_mirror(
                _find_mirror(repo, self.options.repositories), folder
            )
        return self._mirrors[repo]

    def _tests(self, row: SwebenchRow, changes: PatchChanges) -> dict[str, File]:
        named = [p for p in changes.written if p.endswith(".py") and not p.endswith("conftest.py")]
        if not named and self.options.test_command == TEST_COMMAND:
            raise ImportRefusedError("test_patch", "writes no Python file", "give --test-command")
        return grading_files(
            changes,
            fail_to_pass=row.fail_to_pass,
            pass_to_pass=row.pass_to_pass,
            command=f"{self.options.test_command} {shlex.join(named)}".strip(),
        )

    def _settings(self, row: SwebenchRow) -> str:
        metadata = {"repo": row.repo, "base_commit": row.base_commit}
        if image := self.options.image.replace(INSTANCE, _image_id(row.instance_id)):
            pin = self.options.pin
            metadata["etude_image"] = image if pin is None else str(pin(image))
        return toml.write_toml(
            {
                "schema_version": "1.4",
                "source": "swe-bench",
                "metadata": metadata,
                "verifier": {"timeout_sec": self.options.timeout_s},
                "environment": {"network_mode": "no-network"},
            }
        )


def _image_id(instance_id: str) -> str:
    """An instance in the name of its image, where no two underscores may meet."""
    return instance_id.lower().replace("__", "_1776_")


def read_rows(path: Path) -> Iterator[tuple[str, bytes]]:
    """Place and text of every row of a JSONL file.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_ROW_BYTES + 1):
                number += 1
                if line.strip():
                    yield f"{path}:{number}", line
                while len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                    line = file.readline(MAX_ROW_BYTES + 1)
    except OSError as cause:
        what = f"cannot be read: {cause.strerror}"
        raise UserError(Problem("NotFound", what, str(path), "name a file of rows")) from cause


def parse_row(text: bytes) -> SwebenchRow:
    """The row in a line.

    Raises:
        ImportRefusedError: it is none; the message names the field.
    """
    if len(text) > MAX_ROW_BYTES:
        raise ImportRefusedError("row", f"is longer than {MAX_ROW_BYTES} bytes")
    try:
        return SwebenchRow.model_validate(json.loads(text))
    except ValidationError as cause:
        first = cause.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "row"
        raise ImportRefusedError(where, first["msg"].removeprefix("Value error, ")) from cause
    except (ValueError, RecursionError) as cause:
        raise ImportRefusedError("row", f"is no JSON: {cause}") from cause


def _find_mirror(repo: str, folder: Path) -> Path:
    flat = repo.replace("/", "__")
    names = (repo, f"{repo}.git", flat, f"{flat}.git", f"{flat}.bundle")
    for name in names:
        if not {".", ".."} & {*name.split("/")} and (folder / name).exists():
            return folder / name
    fix = f"where there is a network: git clone --mirror https://github.com/{repo} {flat}.git"
    raise ImportRefusedError(str(folder), f"holds no mirror of {repo}", fix)


def grading_files(
    changes: PatchChanges,
    *,
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str] = (),
    command: str,
    log_form: str = PYTEST,
) -> dict[str, File]:
    """The hidden tests of a task, which a command runs and a log answers.

    Args:
        changes: files of the tests.
        fail_to_pass: names of tests that have to pass.
        pass_to_pass: names of tests that have to pass or be skipped.
        command: runs them in the workspace.
        log_form: form of the log, pytest's or one of log_forms.
    """
    expected = {
        "fail_to_pass": fail_to_pass,
        "pass_to_pass": pass_to_pass,
        "deleted": changes.deleted,
        "command": keep_module_path(command),
        "log": log_form,
    }
    found = {f"tests/files/{path}": file for path, file in changes.written.items()}
    found |= {f"tests/{path}": file for path, file in grader_files(log_form).items()}
    found["tests/expected.json"] = File(json.dumps(expected, indent=1).encode() + b"\n")
    found["tests/test.sh"] = File(b"#!/bin/bash\nexec python3 /tests/grade.py\n")
    return found


def grader_files(log_form: str = PYTEST) -> dict[str, File]:
    """Programs that read a log of this form, by their names in the folder of the tests."""
    own = importlib.resources.files(__package__)
    names = {"grade.py": "swebench_grader.py"}
    if log_form != PYTEST:
        names["log_forms.py"] = "log_forms.py"
    return {name: File(own.joinpath(source).read_bytes()) for name, source in names.items()}


def solution_files(changes: PatchChanges) -> dict[str, File]:
    """The solution of a task, which writes and deletes files of the workspace."""
    found = {f"solution/files/{path}": file for path, file in changes.written.items()}
    deleted = "".join(f"rm -f -- {shlex.quote(path)}\n" for path in changes.deleted)
    found["solution/solve.sh"] = File(_SOLVE.format(deleted=deleted).encode())
    return found


def _solution(row: SwebenchRow, gold: PatchChanges) -> dict[str, File]:
    found = solution_files(gold)
    found["solution/gold.patch"] = File(row.patch.encode())
    return found


def _notes(row: SwebenchRow) -> Iterator[str]:
    for key in sorted(row.model_extra or ()):
        if key not in _NOT_READ:
            yield f"key {re.sub(r'[^ -~]', '?', key)[:60]} is not read"
    if not row.patch:
        yield "it has no gold patch, so nothing proves it"


def _left_out(paths: tuple[str, ...]) -> Iterator[str]:
    if paths:
        yield f"{len(paths)} links and submodules are left out, the first is {paths[0]}"
