"""Tasks mined from real projects: image, suite, tasks, solution 1, doing nothing 0.

python bench/repos.py [--driver NAME] [--tasks N] [--only NAME …] [--out DIR]

Takes projects of PyPI, npm, crates.io and Go's proxy, pinned by version and hash, commits each,
builds an image with Debian's toolchain and what its tests need, mines tasks with `etude tasks mine`
in environments of that image, and proves them once more with `etude tasks verify`. Goes on where an
earlier call ended. Needs root, pip, npm, Go and Rust's cargo to fetch dependencies. The process
driver needs no image: its sandboxes see the /usr of this machine.

Examples:
  make bench-repos
  python bench/repos.py --driver process --only itsdangerous click   a first look
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from repos_bench.project_images import build_machine, build_project_image, image_command
from repos_bench.projects import PROJECTS, Project, prepare_project
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do

from tests.support import figures

from etude.envserver.tasks.mining.journal import NAME

DRIVERS = ("gvisor", "process", "qemu-microvm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectResult:
    """Figures of one project."""

    name: str
    image_s: float = 0.0
    """Time of its image's build; 0 without one."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Settings of one call."""

    driver: str
    machine: str
    """Image that gives kernel and agent; empty for the process driver."""
    cache: Path
    num_tasks: int

    def mine_project(self, project: Project) -> ProjectResult:
        """Mine a project and prove its tasks."""
        if self.driver == "process" and shutil.which(project.program) is None:
            return ProjectResult(name=project.name, note=f"{project.program} is missing")
        repository = prepare_project(project, self.cache)
        out = self.cache / f"tasks-{self.driver}" / repository.name
        started_s = time.monotonic()
        words = [sys.executable, "-m", "etude.envserver.tasks.mining.command", str(repository)]
        words += ["--out", str(out), "--tasks", str(self.num_tasks), "--runs", "2"]
        words += self._environment(project)
        command = project.test_command
        if self.driver == "process":
            words += [word for name in project.dependencies for word in ("--with", name)]
        else:
            command = image_command(project)
            say = partial(print, file=sys.stderr)
            words += ["--task-image", build_project_image(project, repository, self.cache, say)]
        image_s = time.monotonic() - started_s if self.machine else 0.0
        words += ["--test-command", command] if command else []
        done = subprocess.run(words, check=False, stderr=subprocess.PIPE, text=True)
        note = "" if done.returncode == 0 else " ".join(done.stderr.split())[-300:]
        found = self._read_result(project, out)
        return replace(
            found, image_s=image_s, seconds=time.monotonic() - started_s - image_s, note=note
        )

    def _environment(self, project: Project) -> list[str]:
        if not self.machine:
            return ["--driver", self.driver, "--slot", project.slot]
        return ["--driver", self.driver, "--image", self.machine]

    def _read_result(self, project: Project, out: Path) -> ProjectResult:
        """Figures of a folder of tasks, each of which is proved once more."""
        journal = out / NAME
        text = journal.read_text() if journal.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        suite: dict[str, Any] = next((line for line in lines if "stable_tests" in line), {})
        folders = [path.parent for path in out.glob("*/task.toml")]
        proofs = list[dict[str, object]]()
        if folders:
            words = [sys.executable, "-m", "etude.envserver.tasks.verify", str(out), "--json"]
            words += self._environment(project)
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
        )


def _record(results: Sequence[ProjectResult], driver: str) -> None:
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
        driver=driver,
        images=sum(found.image_s > 0 for found in results),
        image_s=round(sum(found.image_s for found in results)),
        seconds=round(sum(found.seconds for found in results)),
        megabytes=round(megabytes / max(1, num_tasks), 2),
        tasks_by_project={found.name: found.num_tasks for found in results},
    )


def _print_table(results: Sequence[ProjectResult], driver: str) -> None:
    table = Table("project", "driver", "image s", "tests", "suite s", "tasks", "solved", "noop")
    for name in ("MB a task", "tried", "seconds", "note"):
        table.add_column(name)
    for found in results:
        counts = (found.num_tests, f"{found.suite_s:.1f}", found.num_tasks, found.num_solved)
        rest = (found.num_noop, f"{found.megabytes:.1f}", found.tried, f"{found.seconds:.0f}")
        row = (found.name, driver, f"{found.image_s:.0f}", *counts, *rest, found.note)
        table.add_row(*map(str, row))
    Console(width=160).print(table)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--driver", choices=DRIVERS, default="gvisor")
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path.home() / ".cache" / "etude" / "repos")
    return parser.parse_args()


def main() -> None:
    """Print the table and write bench/out/repos.json."""
    given = _parse()
    cache = given.out.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    machine = "" if given.driver == "process" else build_machine(cache)
    bench = Bench(driver=given.driver, machine=machine, cache=cache, num_tasks=given.tasks)
    results = list[ProjectResult]()
    for project in PROJECTS:
        if given.only and project.name not in given.only:
            continue
        results.append(bench.mine_project(project))
        sys.stderr.write(f"{results[-1]}\n")
    _print_table(results, given.driver)
    num_tasks = sum(found.num_tasks for found in results)
    num_solved = sum(found.num_solved for found in results)
    num_noop = sum(found.num_noop for found in results)
    if not given.only:  # figures are those of all projects
        _record(results, given.driver)
    is_enough = all(found.num_tasks >= given.tasks for found in results)
    sys.exit(0 if is_enough and num_solved == num_noop == num_tasks else 1)


if __name__ == "__main__":
    main()
