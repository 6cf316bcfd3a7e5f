"""Linter of tasks: finds leaks of the solution in history, files and lines, and network use.

python -m etude.envserver.tasks.lint TASK_OR_FOLDER [--limit N] [--driver NAME] [--json]
"""

import asyncio
import base64
import importlib.resources
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.common.errors import EtudeError, UserError
from etude.common.harbor import task as harbor_task
from etude.common.harbor.task import HarborTask
from etude.envserver import exit_codes
from etude.envserver.drivers.base import Verification
from etude.envserver.images.spec import read_spec
from etude.envserver.storage.trees import File
from etude.envserver.tasks import hidden_content, runner
from etude.envserver.tasks.runner import TaskRunner

_REPORT = "/logs/report.json"
_LIMIT_S = 600.0
_FETCH = re.compile(
    r"\b(?:apt(?:-get)?|apk|pip3?|uv pip|uv tool|npm|yarn|pnpm|gem|cargo|go)\s+(?:-\S+\s+)*"
    r"(?:install|add|get|update|upgrade|ci)\b|\buvx\b|\bnpx\b"
    r"|\b(?:curl|wget)\b[^\n]*https?://|\bgit\s+clone\s+\S*(?:https?://|git@)"
)


class _ReportedFinding(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: str = Field(max_length=40)
    where: str = Field(max_length=400)
    what: str = Field(max_length=400)


class _ProbeReport(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    findings: tuple[_ReportedFinding, ...] = Field(max_length=200)
    scanned: int = Field(ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakFinding:
    """One leak of a task, or one use of a network."""

    rule: str
    where: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LintResult:
    """Result of linting one task."""

    task_id: str
    scanned: int = 0
    """Files and git objects that were compared."""
    findings: tuple[LeakFinding, ...] = ()


@dataclass(slots=True)
class TaskLinter:
    """Lints tasks by a probe inside sandboxes."""

    runner: TaskRunner

    async def lint_task(self, folder: Path) -> LintResult:
        try:
            task = harbor_task.read_task(folder)
            report = await self._report(task)
        except EtudeError as error:
            unreadable = LeakFinding(rule="unreadable", where=folder.name, what=str(error))
            return LintResult(task_id=folder.name, findings=(unreadable,))
        inside = [LeakFinding(rule=f.rule, where=f.where, what=f.what) for f in report.findings]
        found = (*_network(task), *inside)
        return LintResult(task_id=task.task_id, scanned=report.scanned, findings=found)

    async def _report(self, task: HarborTask) -> _ProbeReport:
        template, source = await self.runner.prepare(task)
        workspace = {path: file.content for path, file in source.tree.items()}
        tests, solution = task.tests(), task.solution()
        units = {
            "hashes": hidden_content.hidden_hashes(tests, solution),
            "units": [
                {**asdict(unit), "needed": unit.needed}
                for unit in hidden_content.hidden_units(workspace, tests, solution)
            ],
            "keeps_history": task.keeps_history,
        }
        shown = {"probe.py": _probe(), "units.json": json.dumps(units).encode()}
        shown |= {f"extra/{path}": data for path, data in _of_image(task).items()}
        outcome = await self.runner.driver.verify(
            Verification(
                template=template,
                workspace=source.tree,
                tests={path: File(data) for path, data in shown.items()},
                command="python3 /tests/probe.py",
                timeout_s=_LIMIT_S,
                reward_path=_REPORT,
            )
        )
        try:
            return _ProbeReport.model_validate_json(outcome.collected or b"")
        except ValidationError:
            tail = outcome.output[-300:].decode(errors="replace")
            what = f"the probe left no report, exit code {outcome.exit_code}: {tail!r}"
            found = _ReportedFinding(rule="unreadable", where="environment", what=what[:400])
            return _ProbeReport(findings=(found,), scanned=0)


def _probe() -> bytes:
    return importlib.resources.files(__package__).joinpath("leak_probe.py").read_bytes()


def _of_image(task: HarborTask) -> Mapping[str, bytes]:
    """Files that the task's image spec puts into the image."""
    path = task.folder / "image.yaml"
    if not path.is_file():
        return {}
    found = dict[str, bytes]()
    for number, file in enumerate(read_spec(path).files):
        try:
            found[f"{number}"] = base64.b64decode(file.text, validate=True)
        except ValueError:
            found[f"{number}"] = file.text.encode()
    return found


def _network(task: HarborTask) -> Iterator[LeakFinding]:
    """Find lines of scripts that use a network: in a sandbox they wait, then fail."""
    scripts = {f"tests/{path}": data for path, data in task.tests().items()}
    scripts |= {f"solution/{path}": data for path, data in task.solution().items()}
    for path, data in scripts.items():
        if not path.endswith((".sh", ".bash")):
            continue
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            code = line.strip()
            if not code.startswith("#") and _FETCH.search(code):
                what = f"wants a network, which sandboxes do not have: {code[:120]}"
                yield LeakFinding(rule="network", where=f"{path} line {number}", what=what)


async def lint_tasks(
    folders: Sequence[Path],
    chosen: runner.RunnerChoice | None = None,
    say: Callable[[LintResult], None] = lambda _: None,
) -> list[LintResult]:
    """Lint the tasks in these folders, in order.

    Args:
        folders: of tasks.
        chosen: driver and image; the process driver unless given.
        say: called with each result.

    Raises:
        UserError: this machine has no sandbox for it.
    """
    found = list[LintResult]()
    async with runner.open_runner(chosen, folders) as bench:
        linter = TaskLinter(bench)
        for folder in folders:
            found.append(await linter.lint_task(folder))
            say(found[-1])
    return found


def _print_result(looked: LintResult, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps(asdict(looked))}\n")
    for found in looked.findings if not as_json else ():
        line = f"{looked.task_id}: {found.rule}: {found.where}  {found.what}"
        sys.stdout.write("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Lint, print the findings, and the number of clean tasks."""
    given = runner.make_parser("etude.envserver.tasks.lint").parse_args(arguments)
    try:
        folders = runner.chosen_folders(given.folder, given.limit)
        say = partial(_print_result, as_json=given.json)
        found = asyncio.run(lint_tasks(folders, runner.parse_choice(given), say))
    except UserError as error:
        return exit_codes.report_error(error)
    clean = sum(not looked.findings for looked in found)
    if not given.json:
        scanned = sum(looked.scanned for looked in found)
        sys.stdout.write(f"{clean} of {len(found)} tasks are clean ({scanned} files compared)\n")
    return 0 if clean == len(found) else exit_codes.NO


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
