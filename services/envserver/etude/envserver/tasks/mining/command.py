"""The program behind `etude tasks mine`: tasks from a repository with a test suite.

python -m etude.envserver.tasks.mining.command REPO --out DIR [--with FOLDER] [--tasks N]
"""

import argparse
import asyncio
import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from etude.common.api.pool.spec import DriverName
from etude.common.errors import EtudeError, Problem, UserError
from etude.common.pinned_images import parse_pinned
from etude.envserver import exit_codes
from etude.envserver.tasks import runner
from etude.envserver.tasks.mining import languages
from etude.envserver.tasks.mining.journal import MiningJournal, open_journal
from etude.envserver.tasks.mining.languages import MinedLanguage
from etude.envserver.tasks.mining.miner import MiningOptions, TaskMiner
from etude.envserver.tasks.mining.repository import MinedRepository, read_repository
from etude.envserver.tasks.mining.suite import SuiteRunner
from etude.envserver.tasks.runner import RunnerChoice

_MAX_TIMEOUT_S = 86_400
_DEFAULTS = MiningOptions()


def _parser() -> argparse.ArgumentParser:
    parser = runner.make_parser("etude.envserver.tasks.mining.command", takes_tasks=False)
    parser.add_argument("repository", type=Path, help="root of a git repository")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tasks")
    parser.add_argument("--with", action="append", default=[], dest="dependencies")
    parser.add_argument("--task-image", default="", help="of the tasks, by its digest")
    parser.add_argument("--test-command", default="")
    parser.add_argument("--tasks", type=int, default=_DEFAULTS.num_tasks)
    parser.add_argument("--seed", type=int, default=_DEFAULTS.seed)
    parser.add_argument("--runs", type=int, default=_DEFAULTS.num_runs)
    parser.add_argument("--jobs", type=int, default=_DEFAULTS.num_jobs)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one suite")
    return parser


def _check(given: argparse.Namespace) -> None:
    for option, value, low in (
        ("--tasks", given.tasks, 1),
        ("--runs", given.runs, 2),
        ("--jobs", given.jobs, 1),
    ):
        if not low <= value <= 100_000:
            raise exit_codes.option_error(option, f"is {value}", f"give {low} or more")
    if not 0 < given.timeout <= _MAX_TIMEOUT_S:
        raise exit_codes.option_error("--timeout", f"is {given.timeout}", "give seconds, to a day")


def _detect(repository: MinedRepository, folder: Path) -> MinedLanguage:
    language = languages.detect_language(repository.files)
    if language is None:
        known = ", ".join(f"{each.name} ({each.manifests[0]})" for each in languages.LANGUAGES)
        what = "has no manifest of a language that can be mined in its root"
        fix = f"mine a repository of one of {known}"
        raise UserError(Problem("InvalidRepository", what, str(folder), fix))
    return language


def _choice(given: argparse.Namespace) -> RunnerChoice:
    """Parse the options of the runner, and the image of the tasks.

    Raises:
        UserError: it is no image by its digest, or the driver runs none.
    """
    choice = runner.parse_choice(given)
    if not given.task_image:
        return choice
    if choice.driver is DriverName.PROCESS:
        fix = "add --driver gvisor --image NAME, or qemu-microvm"
        raise UserError(Problem("Usage", "is for microVMs and gVisor only", "--task-image", fix))
    return replace(choice, task_image=str(parse_pinned(given.task_image)))


async def _mine(
    given: argparse.Namespace, repository: MinedRepository, language: MinedLanguage
) -> MiningJournal:
    command = given.test_command or language.test_command
    settings = {
        "repository": repository.digest,
        "test command": command,
        "seed": str(given.seed),
        "image": given.task_image or given.image,
    }
    with open_journal(given.out, settings) as journal, open_scratch(given.out) as scratch:
        async with runner.open_runner(_choice(given), []) as opened:
            suite = SuiteRunner(
                runner=opened,
                image=given.task_image or given.image,
                template=await opened.prepare_suite(),
                command=command,
                log_form=language.log_form,
                timeout_s=given.timeout,
            )
            options = MiningOptions(
                seed=given.seed, num_tasks=given.tasks, num_runs=given.runs, num_jobs=given.jobs
            )
            miner = TaskMiner(
                repository=repository,
                language=language,
                suite=suite,
                options=options,
                journal=journal,
                scratch=scratch,
                say=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201 - progress
            )
            await miner.mine()
    return journal


@contextlib.contextmanager
def open_scratch(out: Path) -> Iterator[Path]:
    """Make an empty folder for tasks that are not proved, and remove it in the end.

    It lies in the folder of the tasks, so that a rename is enough. Its name begins with a dot, as
    no task's does.
    """
    scratch = out / ".unproved"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """Mine, print the tasks' names; exit with 1 if there are fewer than were asked for."""
    given = _parser().parse_args(arguments)
    try:
        _check(given)
        repository = read_repository(
            exit_codes.require_folder(given.repository), given.dependencies
        )
        journal = asyncio.run(_mine(given, repository, _detect(repository, given.repository)))
    except (UserError, OSError) as error:
        return exit_codes.report_error(error)
    except EtudeError as error:
        sys.stderr.write(f"{error}\nRun the command again: it goes on from here.\n")
        return exit_codes.NO
    tasks = sorted(line.task_id for line in journal.outcomes.values() if line.task_id)
    sys.stdout.write("".join(f"{task_id}\n" for task_id in tasks))
    tried = len(journal.outcomes)
    sys.stderr.write(f"{len(tasks)} tasks in {given.out}, of {tried} mutations\n")
    return 0 if len(tasks) >= given.tasks else exit_codes.NO


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
