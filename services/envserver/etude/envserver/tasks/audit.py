"""Audit of tasks: static search for eight classes of flaws by which a policy earns without work.

python -m etude.envserver.tasks.audit TASK_OR_FOLDER [--limit N] [--json] [--images]

Nothing of a task is run: its files are read as text, and with --images every layer of the image
that it names by digest. `etude tasks lint` looks further for shipped answers, inside a sandbox, and
`etude tasks verify` proves what a task accepts.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from etude.agent import patterns
from etude.common.errors import EtudeError, UserError
from etude.common.harbor import task as harbor_task
from etude.common.harbor.grading_repairs import GUARD_FOLDER, TEST_PATHS, repair_grading
from etude.common.harbor.task import HarborTask
from etude.envserver import exit_codes
from etude.envserver.images.pull.registry_access import RegistryAccess
from etude.envserver.storage import hygiene
from etude.envserver.storage.trees import File
from etude.envserver.tasks import hidden_content, runner
from etude.envserver.tasks.image_audit import ImageAuditor, TaskImageLeaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """One flaw of a task."""

    rule: str
    where: str
    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """Result of auditing one task."""

    task_id: str
    flaws: tuple[Flaw, ...] = ()


class _Pattern(NamedTuple):
    """A line of the verifier that shows a flaw."""

    rule: str
    pattern: re.Pattern[str]
    what: str
    fix: str


_LINES = (
    _Pattern(
        "shared-sandbox",
        re.compile(r"\b(?:source|\.|bash|sh)\s+(?:/workspace|\./|\$PWD)[^\s;]*\.sh\b"),
        "runs a script of the workspace, which the agent can change",
        "keep the script in tests/, or list it in metadata.etude_protected",
    ),
    _Pattern(
        "evaluated-input",
        re.compile(
            r"(?<![\w.])(?:eval|exec)\(|\bpickle\.loads?\(|\byaml\.(?:unsafe_)?load\((?![^)\n]*Safe)"
            r"|\beval\s+[\"']?\$"
        ),
        "evaluates data: if it is the agent's, it is code of the verifier",
        "parse it: ast.literal_eval, json.loads, yaml.safe_load",
    ),
    _Pattern(
        "judge-without-guard",
        re.compile(
            r"chat/completions|\bimport (?:openai|anthropic)\b|\bfrom (?:openai|anthropic)\b"
        ),
        "asks a model, to which the agent's text can speak",
        "use a reward function Judge, or check its answer against a schema beside other evidence",
    ),
    _Pattern(
        "weak-match",
        re.compile(
            r"\bgrep\s+(?:-\w*q\w*|-c)\s|\|\s*grep\b|\bassert\s+[\"'][^\"']{1,40}[\"']\s+in\s"
        ),
        "accepts any output that holds a text",
        "compare the whole value, or anchor the pattern and count what it must not find",
    ),
    _Pattern(
        "cannot-fail",
        re.compile(r"\b(?:pytest|unittest|npm test|go test|cargo test)\b[^\n]*\|\|\s*(?:true|:)"),
        "ignores the failure of its tests",
        "let the exit code of the tests decide the reward",
    ),
    _Pattern(
        "broad-rights",
        re.compile(r"\bsudo\b|\bchmod\s+(?:-R\s+)?(?:0?777|a\+rwx)\b|\bchmod\s+[ug]?\+s\b"),
        "gives more rights than its tests need",
        "run it as the sandbox's own user, on files of that user",
    ),
)
RULES: Mapping[str, str] = MappingProxyType(
    {
        "shared-sandbox": "the verifier runs what the agent can change, or where the agent worked",
        "shipped-answer": "the first files hold an answer, or what answers are found in",
        "evaluated-input": "the verifier evaluates data of the agent",
        "judge-without-guard": "the verifier asks a model without a schema or other evidence",
        "weak-match": "the verifier accepts any output that holds a text",
        "cannot-fail": "the verifier has no way to a reward of 0",
        "trusted-output": "the verdict rests on a process that the agent's code can end",
        "broad-rights": "the verifier, or what the task allows, gives more rights than needed",
    }
)
"""The eight classes of flaws."""
_ZERO = re.compile(r"\b0(?:\.0)?\b")
_REWARD = re.compile(r"reward\.(?:txt|json)")
_CHECKS = re.compile(r"\bassert|\braise\b|\.assert\w+\(|sys\.exit|\bexpect\(|t\.(?:Error|Fatal)")


def audit_task(folder: Path, images: TaskImageLeaks | None = None) -> AuditResult:
    """Audit the task in a folder, and its image; one that cannot be read has `unreadable`."""
    try:
        task = harbor_task.read_task(folder)
        files = harbor_task.read_files(task.environment)
        tests, solution = task.tests(), task.solution()
    except EtudeError as error:
        unreadable = Flaw(rule="unreadable", where=folder.name, what=str(error), fix="correct it")
        return AuditResult(task_id=folder.name, flaws=(unreadable,))
    found = [
        *_lines(task, tests),
        *_shipped(task, files, tests, solution),
        *_verdict(task, tests),
        *_rights(task),
        *(_in_image(task, images) if images is not None else ()),
    ]
    return AuditResult(task_id=task.task_id, flaws=tuple(found))


def _lines(task: HarborTask, tests: Mapping[str, bytes]) -> Iterator[Flaw]:
    texts = {f"tests/{path}": data.decode("utf-8", "replace") for path, data in tests.items()}
    if task.command != harbor_task.TEST_COMMAND:
        texts["task.toml"] = task.command
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith(("#", "//")):
                continue
            for each in _LINES:
                if each.pattern.search(line):
                    where = f"{path} line {number}"
                    yield Flaw(rule=each.rule, where=where, what=each.what, fix=each.fix)


def _shipped(
    task: HarborTask,
    files: Mapping[str, bytes],
    tests: Mapping[str, bytes],
    solution: Mapping[str, bytes],
) -> Iterator[Flaw]:
    tree = {path: File(data) for path, data in files.items()}
    clean = hygiene.remove_leftovers(tree)
    for path in sorted(tree.keys() - clean.keys())[:20]:
        what = "was left behind by a program, and may hold an answer"
        yield Flaw(rule="shipped-answer", where=path, what=what, fix="remove it")
    hashes = hidden_content.hidden_hashes(tests, solution)
    known = hidden_content.hidden_hashes(files, {})
    for digest in sorted(hashes.keys() & known.keys()):
        where = known[digest].removeprefix("tests/")
        what = f"is {hashes[digest]}, which the agent must not see"
        yield Flaw(rule="shipped-answer", where=where, what=what, fix="remove it")
    if not task.keeps_history and any("/objects/pack/" in path for path in files):
        what = "holds packed commits"
        yield Flaw(
            rule="shipped-answer", where=".git", what=what, fix="etude tasks lint names them"
        )


def _verdict(task: HarborTask, tests: Mapping[str, bytes]) -> Iterator[Flaw]:
    script = tests.get("test.sh", b"").decode("utf-8", "replace")
    texts = [script, *(data.decode("utf-8", "replace") for data in tests.values())]
    rewards = [text for text in texts if _REWARD.search(text)]
    if rewards and not any(_ZERO.search(text) for text in rewards):
        what = "writes a reward, and never 0"
        fix = "write 0 where the tests fail"
        yield Flaw(rule="cannot-fail", where="tests", what=what, fix=fix)
    for path, data in tests.items():
        is_test = re.search(r"(?:^|/)(?:test_[^/]*|[^/]*_test)\.(?:py|go|js|ts)$", path)
        if is_test and not _CHECKS.search(data.decode("utf-8", "replace")):
            what, fix = "checks nothing", "assert what the request asks for"
            yield Flaw(rule="cannot-fail", where=f"tests/{path}", what=what, fix=fix)
    repaired = repair_grading(task, tests)
    is_guarded = any(path.startswith(f"{GUARD_FOLDER}/") for path in repaired.files)
    if "pytest" in script and not is_guarded:
        what = "sets PYTHONPATH or isolates Python, so that no guard counts the tests of its pytest"
        fix = "write PYTHONPATH=$PYTHONPATH:FOLDER, or start `python3 -m pytest` in FOLDER"
        yield Flaw(rule="trusted-output", where="tests/test.sh", what=what, fix=fix)


def _rights(task: HarborTask) -> Iterator[Flaw]:
    if task.is_graded_in_fork:
        what = "is graded in a fork of the agent's sandbox, which proves less"
        fix = "metadata.etude_grade = 'clean', unless a service holds what counts"
        yield Flaw(rule="shared-sandbox", where="task.toml", what=what, fix=fix)
    probes = ("conftest.py", "pytest.ini", "tests/test_a.py", "sitecustomize.py", "package.json")
    for glob in task.allowed:
        matcher = patterns.glob_matcher(glob)
        hit = next((each for each in probes if matcher.fullmatch(each.encode())), "")
        if hit and glob not in TEST_PATHS:
            what = f"etude_allowed has {glob!r}, so that the agent may change {hit}"
            yield Flaw(rule="broad-rights", where="task.toml", what=what, fix="name single files")


def _in_image(task: HarborTask, images: TaskImageLeaks) -> Iterator[Flaw]:
    fix = "build the image without it: what a later layer removes is still in the image"
    for leak in images.take(task):
        yield Flaw(rule="shipped-answer", where=leak.where, what=leak.what, fix=fix)


def clean_task(folder: Path) -> int:
    """Remove leftovers from a task's first files, and all commits but one; returns their number.

    A task that cannot be read stays as it is: the audit names the reason.
    """
    try:
        task = harbor_task.read_task(folder)
        files = harbor_task.read_files(task.environment)
    except EtudeError:
        return 0
    tree = {
        p: File(c, bool((task.environment / p).stat().st_mode & 0o100)) for p, c in files.items()
    }
    clean = hygiene.clean_first_files(tree, keeps_history=task.keeps_history)
    gone = tree.keys() - clean.keys()
    for path in gone:
        (task.environment / path).unlink()
    for path, file in clean.items():
        if tree.get(path) != file:
            target = task.environment / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.content)
    return len(gone)


def _print_result(result: AuditResult, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps(asdict(result))}\n")
    for flaw in result.flaws if not as_json else ():
        line = f"{result.task_id}: {flaw.rule}: {flaw.where}  {flaw.what}; fix: {flaw.fix}"
        sys.stdout.write("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) + "\n")


def audit_tasks(
    folders: Sequence[Path],
    say: Callable[[AuditResult], None] = lambda _: None,
    images: ImageAuditor | None = None,
) -> list[AuditResult]:
    """Audit the tasks in these folders, in order.

    Args:
        folders: of tasks.
        say: called with each result.
        images: looks into the images of the tasks, if given.
    """
    found = list[AuditResult]()
    leaks = None if images is None else TaskImageLeaks.of_tasks(images, folders)
    for folder in folders:
        found.append(audit_task(folder, leaks))
        say(found[-1])
    return found


def _make_auditor(given: argparse.Namespace) -> ImageAuditor | None:
    """Make the auditor of images; None if they are not asked for.

    Raises:
        option_error: credentials are given for nothing.
    """
    if given.images:
        return ImageAuditor(registries=RegistryAccess(credentials=given.credentials))
    if given.credentials:
        fix = "add --images, or leave it out"
        raise exit_codes.option_error("--credentials", "is for images alone", fix)
    return None


def main(arguments: Sequence[str]) -> int:
    """Audit, print the flaws, and the number of tasks without any."""
    parser = argparse.ArgumentParser(prog="python -m etude.envserver.tasks.audit")
    parser.add_argument("folder", type=Path, help="a task folder, or a folder of them")
    parser.add_argument("--limit", type=int, default=0, help="at most this many; 0 means all")
    parser.add_argument("--json", action="store_true", help="one JSON object per task")
    parser.add_argument("--clean", action="store_true", help="first remove leftovers and commits")
    parser.add_argument("--images", action="store_true", help="also the layers of their images")
    parser.add_argument("--credentials", type=Path, help="of registries, as Docker writes them")
    given = parser.parse_args(arguments)
    try:
        images = _make_auditor(given)
        folders = runner.chosen_folders(given.folder, given.limit)
    except UserError as error:
        return exit_codes.report_error(error)
    cleaned = sum(map(clean_task, folders)) if given.clean else 0
    if given.clean and not given.json:
        sys.stdout.write(f"{cleaned} files removed\n")
    found = audit_tasks(folders, lambda result: _print_result(result, as_json=given.json), images)
    sound = sum(not result.flaws for result in found)
    if not given.json:
        sys.stdout.write(f"{sound} of {len(found)} tasks have no known flaw\n")
    return 0 if sound == len(found) else exit_codes.NO


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
