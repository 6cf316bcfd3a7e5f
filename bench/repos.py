"""Tasks mined from real projects: suite in a sandbox, tasks, solution 1, doing nothing 0.

python bench/repos.py [--tasks N] [--only NAME …] [--out DIR]

Takes projects of PyPI, npm, crates.io and Go's proxy, pinned by version and hash, commits each,
adds what its tests need, mines tasks with `etude tasks mine` in the process driver,
and proves them once more with `etude tasks verify`. Goes on where an earlier call ended. Needs pip,
Node with npm, Go, Rust's cargo for the vendored crates, and Debian's cargo for sandboxes, which see
/usr alone.

Examples:
  make bench-repos
  python bench/repos.py --only itsdangerous click   a first look
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repos_bench.projects import PROJECTS, Project, prepare_project
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do

from tests.support import figures

from etude.envserver.tasks.mining.journal import NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectResult:
    """Figures of one project."""

    name: str
    suite_s: float = 0.0
    num_tests: int = 0
    num_tasks: int = 0
    num_solved: int = 0
    """Tasks whose solution scores 1."""
    num_noop: int = 0
    """Tasks for which doing nothing scores 0."""
    megabytes: float = 0.0
    """Of one task."""
    tried: int = 0
    seconds: float = 0.0
    note: str = ""


def mine_project(project: Project, cache: Path, num_tasks: int) -> ProjectResult:
    """Mine a project and prove its tasks."""
    if shutil.which(project.program) is None:
        return ProjectResult(name=project.name, note=f"{project.program} is missing")
    repository = prepare_project(project, cache)
    out = cache / "tasks" / repository.name
    started_s = time.monotonic()
    words = [sys.executable, "-m", "etude.envserver.tasks.mining.command", str(repository)]
    words += ["--out", str(out), "--tasks", str(num_tasks), "--runs", "2"]
    words += ["--slot", project.slot]
    words += [word for name in project.dependencies for word in ("--with", name)]
    if project.test_command:
        words += ["--test-command", project.test_command]
    done = subprocess.run(words, check=False, stderr=subprocess.PIPE, text=True)
    note = "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1][:120]
    return read_result(project, out, seconds=time.monotonic() - started_s, note=note)


def read_result(project: Project, out: Path, *, seconds: float, note: str) -> ProjectResult:
    """Figures of a folder of tasks, each of which is proved once more."""
    journal = out / NAME
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if out.exists() else []
    suite: dict[str, Any] = next((line for line in lines if "stable_tests" in line), {})
    folders = [path.parent for path in out.glob("*/task.toml")]
    proofs = list[dict[str, object]]()
    if folders:
        words = [sys.executable, "-m", "etude.envserver.tasks.verify", str(out), "--json"]
        words += ["--slot", project.slot]
        done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True)
        proofs = [json.loads(line) for line in done.stdout.splitlines()]
    size = sum(p.stat().st_size for f in folders for p in f.rglob("*") if p.is_file())
    return ProjectResult(
        name=project.name,
        suite_s=suite.get("suite_s", 0.0),
        num_tests=len(suite.get("stable_tests", ())),
        num_tasks=len(folders),
        num_solved=sum(proof["solution"] == 1 for proof in proofs),
        num_noop=sum(proof["nothing"] == 0 for proof in proofs),
        megabytes=size / (1 << 20) / max(1, len(folders)),
        tried=sum("mutation" in line for line in lines),
        seconds=seconds,
        note=note,
    )


def _record(results: Sequence[ProjectResult]) -> None:
    """Record the figures; seconds are those of the last call, which goes on where one ended."""
    num_tasks = sum(found.num_tasks for found in results)
    megabytes = sum(found.megabytes * found.num_tasks for found in results)
    figures.record(
        "repos",
        projects=len(results),
        suites_green=sum(found.num_tests > 0 for found in results),
        tasks=num_tasks,
        solved=sum(found.num_solved for found in results),
        noop=sum(found.num_noop for found in results),
        driver="Process",
        seconds=round(sum(found.seconds for found in results)),
        megabytes=round(megabytes / max(1, num_tasks), 2),
        tasks_by_project={found.name: found.num_tasks for found in results},
    )


def main() -> None:
    """Print the table and write bench/out/repos.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path.home() / ".cache" / "etude" / "repos")
    options = parser.parse_args()
    table = Table("project", "driver", "tests", "suite s", "tasks", "solved", "noop", "MB a task")
    for name in ("tried", "seconds", "note"):
        table.add_column(name)
    results = list[ProjectResult]()
    for project in PROJECTS:
        if options.only and project.name not in options.only:
            continue
        found = mine_project(project, options.out.resolve(), options.tasks)
        results.append(found)
        sys.stderr.write(f"{found}\n")
        counts = (found.num_tests, f"{found.suite_s:.1f}", found.num_tasks, found.num_solved)
        rest = (found.num_noop, f"{found.megabytes:.1f}", found.tried, f"{found.seconds:.0f}")
        row = (project.name, "Process", *counts, *rest, found.note)
        table.add_row(*map(str, row))
    Console(width=140).print(table)
    num_tasks = sum(found.num_tasks for found in results)
    num_solved = sum(found.num_solved for found in results)
    num_noop = sum(found.num_noop for found in results)
    if not options.only:  # figures are those of all projects
        _record(results)
    is_enough = all(found.num_tasks >= options.tasks for found in results)
    sys.exit(0 if is_enough and num_solved == num_noop == num_tasks else 1)


if __name__ == "__main__":
    main()
