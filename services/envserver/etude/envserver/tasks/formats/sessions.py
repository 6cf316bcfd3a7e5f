"""Reviewed sessions of users as task folders, from lines that the feedback service prints."""

import ast
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.common.evaluation.quality import count_changed_lines
from etude.envserver.storage.trees import File
from etude.envserver.tasks.formats import swebench, toml
from etude.envserver.tasks.formats.git_mirror import GitMirror, PatchChanges
from etude.envserver.tasks.formats.imported_task import ImportedTask, ImportRefusedError

USUAL_LINES = 150
"""Median change of the generated suite: tasks below it measure less."""
TIMEOUT_S = 600.0


class SessionRow(BaseModel):
    """One accepted session."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    task_id: Annotated[str, Field(pattern=r"^session-[0-9a-f]{16}$")]
    request: Annotated[str, Field(min_length=1, max_length=400)]
    commit: str
    reference: Annotated[str, Field(min_length=1)]
    tests: Annotated[str, Field(min_length=1)]
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionImporter:
    """Makes tasks of rows."""

    mirror: GitMirror
    commit: str
    """For rows that name none."""
    test_command: str

    def import_row(self, row: SessionRow) -> ImportedTask:
        """The task of a row.

        Raises:
            ImportRefusedError: the repository lacks the commit, a patch does not apply, or the
                hidden tests are no tests in Python.
        """
        commit = row.commit or self.commit
        if not commit:
            raise ImportRefusedError("commit", "is not named", "name it there, or give --commit")
        checkout = self.mirror.checkout(commit)
        reference = self.mirror.changes(commit, row.reference, "reference")
        tests = self.mirror.changes(commit, row.tests, "tests")
        both = sorted(reference.written.keys() & tests.written.keys())
        if both:
            raise ImportRefusedError("reference", f"writes {both[0]}, a file of the hidden tests")
        files = {f"environment/{path}": file for path, file in checkout.files.items()}
        files |= self._tests(tests)
        files |= _solution(row, reference)
        files["instruction.md"] = File(row.request.strip().encode() + b"\n")
        files["task.toml"] = File(_settings(commit).encode())
        return ImportedTask(row.task_id, files, tuple(_notes(checkout.files, reference)))

    def _tests(self, changes: PatchChanges) -> dict[str, File]:
        named = {
            path: list_tests(path, file.content)
            for path, file in changes.written.items()
            if path.endswith(".py") and not path.endswith("conftest.py")
        }
        expected = [test for tests in named.values() for test in tests]
        if not expected:
            raise ImportRefusedError("tests", "adds no function test_…() in a Python file")
        return swebench.grading_files(
            changes,
            fail_to_pass=expected,
            command=f"{self.test_command} {shlex.join(path for path in named if named[path])}",
        )


def parse_rows(lines: Iterable[bytes]) -> Iterator[SessionRow]:
    """Parse lines.

    Raises:
        ImportRefusedError: a line is no row.
    """
    for line in lines:
        try:
            yield SessionRow.model_validate_json(line)
        except ValidationError as cause:
            first = cause.errors(include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "row"
            raise ImportRefusedError(where, first["msg"]) from cause


def list_tests(path: str, source: bytes) -> list[str]:
    """Names of the tests of a Python file, as pytest prints them.

    One with parameters ends behind its bracket: the grader wants all that begin with it to pass.

    Raises:
        ImportRefusedError: it is no Python.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        raise ImportRefusedError(path, f"is no Python: {cause}") from cause
    return list(_list_tests(path, tree.body))


def _list_tests(prefix: str, body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name.startswith("test"):
                marks = (ast.unparse(each) for each in node.decorator_list)
                bracket = "[" if any("parametrize" in mark for mark in marks) else ""
                yield f"{prefix}::{node.name}{bracket}"
            case ast.ClassDef() if node.name.startswith("Test"):
                yield from _list_tests(f"{prefix}::{node.name}", node.body)
            case _:
                pass


def _solution(row: SessionRow, reference: PatchChanges) -> dict[str, File]:
    found = swebench.solution_files(reference)
    changed = sorted((*reference.written, *reference.deleted))
    listed = "".join(f"- {path}\n" for path in changed)
    answer = row.answer.strip() or f"# Files\n\nThe reference changes\n\n{listed}"
    found["solution/answer.md"] = File(answer.encode() + b"\n")
    return found


def _settings(commit: str) -> str:
    return toml.write_toml(
        {
            "schema_version": "1.4",
            "source": "sessions",
            "metadata": {"category": "sessions", "base_commit": commit},
            "verifier": {"timeout_sec": TIMEOUT_S},
            "environment": {"network_mode": "no-network"},
        }
    )


def _notes(before: Mapping[str, File], reference: PatchChanges) -> Iterator[str]:
    changes = {path: file.content for path, file in reference.written.items()}
    changes |= dict.fromkeys(reference.deleted, b"")
    number = sum(
        count_changed_lines(
            before.get(path, File(b"")).content.decode(errors="replace"),
            after.decode(errors="replace"),
        )
        for path, after in changes.items()
    )
    if number < USUAL_LINES:
        yield (
            f"its reference changes {number} lines in {len(changes)} files; tasks of the generated"
            f" suite change {USUAL_LINES} or more"
        )
