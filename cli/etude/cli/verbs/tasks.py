"""`etude tasks`: make, look at and verify tasks."""

import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from etude.cli import runs
from etude.cli.examples import epilog
from etude.cli.verbs.options import (
    Endpoint,
    KeyStore,
    Ledger,
    LedgerStore,
    Region,
    RunFolder,
    Secret,
    write_ledger_options,
)
from etude.cli.verbs.weights import find_source_model
from etude.common.errors import Problem, UserError

_SLOT = "Fields of a pool's slot for each sandbox, as memoryMib=4096,processes=512."
_Credentials = Annotated[
    Path | None, typer.Option(help="File in the format of Docker's config.json, of registries.")
]
app = typer.Typer(no_args_is_help=True, help="Make, look at and verify tasks.")


class Suite(StrEnum):
    """Task sets that a seed makes."""

    DEMO = "demo"
    SESSIONS = "sessions"


def _run(module: str, *arguments: str) -> None:
    # The environments part is never imported here: it is another process, as in a cluster.
    done = subprocess.run([sys.executable, "-m", module, *arguments], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


@app.command(epilog=epilog("generate"))
def generate(
    out: Annotated[Path, typer.Argument(help="Folder to create.")],
    *,
    suite: Annotated[
        Suite, typer.Option(help="The demo's repairs, or long sessions.")
    ] = Suite.DEMO,
    seed: Annotated[int, typer.Option(help="Everything follows from it.")] = 0,
    train: Annotated[
        int | None, typer.Option(help="Tasks to train on; 640, or none of sessions.")
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(help="Tasks to measure on; 256, or 64 sessions.")
    ] = None,
    traces: Annotated[
        int | None, typer.Option(help="Demonstrations for the demo's warm-up; 8,000.")
    ] = None,
) -> None:
    """Write a seeded task set: the demo's (model folder, tasks, demonstrations), or sessions."""
    sizes = {"--train": train, "--held-out": held_out, "--traces": traces}
    given = [word for name, size in sizes.items() if size is not None for word in (name, str(size))]
    module = "etude.demo.generate" if suite is Suite.DEMO else "etude.demo.sessions.generate"
    _run(module, *("--out", str(out), "--seed", str(seed)), *given)


@app.command(epilog=epilog("show"))
def show(
    task: Annotated[Path, typer.Argument(help="A task folder in Harbor layout.")],
) -> None:
    """Print a task as its author sees it: instruction, files, tests, solution."""
    _run("etude.envserver.tasks.show", str(task))


@app.command(epilog=epilog("verify"))
def verify(
    folder: Annotated[Path, typer.Argument(help="A task folder, or a folder of them.")],
    *,
    limit: Annotated[int, typer.Option(help="Check at most this many; 0 means all.")] = 0,
    driver: Annotated[str, typer.Option(help="process, gvisor or qemu-microvm.")] = "process",
    image: Annotated[str, typer.Option(help="What a microVM boots for tasks that name none.")] = "",
    slot: Annotated[str, typer.Option(help=_SLOT)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per task.")] = False,
) -> None:
    """Prove each task in a real sandbox: its solution scores 1, doing nothing scores 0."""
    _run(
        "etude.envserver.tasks.verify",
        *(str(folder), "--limit", str(limit), "--driver", driver, "--image", image),
        *("--slot", slot),
        *(("--json",) if as_json else ()),
    )


@app.command(epilog=epilog("tasks lint"))
def lint(
    folder: Annotated[Path, typer.Argument(help="A task folder, or a folder of them.")],
    *,
    limit: Annotated[int, typer.Option(help="Look at most at this many; 0 means all.")] = 0,
    driver: Annotated[str, typer.Option(help="process, gvisor or qemu-microvm.")] = "process",
    image: Annotated[str, typer.Option(help="What a microVM boots for tasks that name none.")] = "",
    slot: Annotated[str, typer.Option(help=_SLOT)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per task.")] = False,
) -> None:
    """Find what gives a task away: history, hidden files, gold lines, a network."""
    _run(
        "etude.envserver.tasks.lint",
        *(str(folder), "--limit", str(limit), "--driver", driver, "--image", image),
        *("--slot", slot),
        *(("--json",) if as_json else ()),
    )


@app.command(epilog=epilog("tasks audit"))
def audit(
    folder: Annotated[Path, typer.Argument(help="A task folder, or a folder of them.")],
    *,
    limit: Annotated[int, typer.Option(help="Look at most at this many; 0 means all.")] = 0,
    clean: Annotated[
        bool, typer.Option("--clean", help="First remove caches, histories and old commits.")
    ] = False,
    images: Annotated[
        bool, typer.Option("--images", help="Read every layer of the images by digest, too.")
    ] = False,
    credentials: _Credentials = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per task.")] = False,
) -> None:
    """Find flaws by which a policy earns without work, in eight classes; nothing is run."""
    words = [str(folder), "--limit", str(limit)]
    flags = (("--clean", clean), ("--images", images), ("--json", as_json))
    words += [name for name, given in flags if given]
    words += ["--credentials", str(credentials)] if credentials else []
    _run("etude.envserver.tasks.audit", *words)


@app.command(epilog=epilog("mine"))
def mine(  # noqa: PLR0913 - one for each option
    repository: Annotated[Path, typer.Argument(help="Root of a git repository.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the tasks; a later call goes on in it.")],
    dependencies: Annotated[
        list[str], typer.Option("--with", help="Ignored folder in it that its tests need.")
    ] = [],  # noqa: B006 - Typer copies it
    test_command: Annotated[
        str, typer.Option(help="Runs its tests in the root; by language unless given.")
    ] = "",
    tasks: Annotated[int, typer.Option(help="Number of tasks to have in the folder.")] = 10,
    seed: Annotated[int, typer.Option(help="Chooses functions, changes and wordings.")] = 0,
    repeats: Annotated[
        int, typer.Option("--runs", help="Runs of the suite, by which flaky tests are found.")
    ] = 3,
    jobs: Annotated[int, typer.Option(help="Functions that are tried at a time.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds that its suite may take.")] = 600.0,
    driver: Annotated[str, typer.Option(help="process, gvisor or qemu-microvm.")] = "process",
    image: Annotated[str, typer.Option(help="What a microVM boots.")] = "",
    task_image: Annotated[
        str, typer.Option(help="Image of the tasks, by its digest; its working folder is empty.")
    ] = "",
    slot: Annotated[str, typer.Option(help=_SLOT)] = "",
) -> None:
    """Make tasks of a repository: break one function at a time, and keep what its tests notice.

    Each task is proved in a sandbox before it is written: its solution scores 1, doing nothing 0.
    """
    given = [word for folder in dependencies for word in ("--with", folder)]
    _run(
        "etude.envserver.tasks.mining.command",
        *(str(repository), "--out", str(out), "--test-command", test_command),
        *("--tasks", str(tasks), "--seed", str(seed), "--runs", str(repeats)),
        *("--jobs", str(jobs), "--timeout", str(timeout), "--driver", driver, "--image", image),
        *("--task-image", task_image, "--slot", slot),
        *given,
    )


_TERMS = typer.Option(help="Version of the terms that allows tasks of sessions; repeatable.")
_SESSIONS = "etude.feedback.commands.sessions"


@app.command(epilog=epilog("from-sessions"))
def from_sessions(  # noqa: PLR0913 - one for each option
    review: Annotated[Path, typer.Option(help="Review: made, or read if --repo is given.")],
    *,
    store: LedgerStore,
    key_store: KeyStore,
    secret: Secret,
    ledger: Ledger = "feedback",
    tenant: Annotated[str, typer.Option(help="To list: tenant of the sessions.")] = "",
    terms: Annotated[list[str], _TERMS] = [],  # noqa: B006 - Typer copies it
    model: Annotated[
        Path | None, typer.Option(help="To list: model folder, by which requests are read.")
    ] = None,
    limit: Annotated[int, typer.Option(help="To list: candidates with their texts.")] = 200,
    repo: Annotated[Path | None, typer.Option(help="To write: repository, or a bundle.")] = None,
    out: Annotated[Path | None, typer.Option(help="To write: folder of the new tasks.")] = None,
    commit: Annotated[
        str, typer.Option(help="To write: state of the repository, for sessions that name none.")
    ] = "",
    test_command: Annotated[str, typer.Option(help="To write: as for SWE-bench.")] = "",
    driver: Annotated[str, typer.Option(help="process, gvisor or qemu-microvm.")] = "process",
    image: Annotated[str, typer.Option(help="What a microVM boots.")] = "",
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Turn sessions of users who allow it into tasks: list, let a person review, write.

    Without --repo, candidates are listed in a new review with the reasons that speak against them.
    With it, those that a person marked as accepted are written, if a sandbox proves them.
    """
    access = write_ledger_options(store, key_store, secret, ledger, (endpoint, region))
    if repo is None:
        words = ["--limit", str(limit), *(["--model", str(model)] if model else [])]
        _list_sessions(review, tenant, terms, [*words, *access])
        return
    if out is None:
        raise UserError(Problem("Usage", "is missing", "--out", "name the folder of the new tasks"))
    words = ["--repo", str(repo), "--out", str(out), "--commit", commit, "--driver", driver]
    words += ["--image", image, "--test-command", test_command]
    _write_sessions(review, access, words)


def _list_sessions(review: Path, tenant: str, terms: Sequence[str], words: Sequence[str]) -> None:
    """List candidates in a new review."""
    if not tenant or not terms:
        missing = "--terms" if tenant else "--tenant"
        fix = "name tenant and terms to list sessions, or --repo and --out to write tasks"
        raise UserError(Problem("Usage", "is missing", missing, fix))
    allowed = [word for each in terms for word in ("--terms", each)]
    _run(_SESSIONS, "list", "--review", str(review), "--tenant", tenant, *allowed, *words)


def _write_sessions(review: Path, access: Sequence[str], words: Sequence[str]) -> None:
    """Write the tasks of accepted sessions, and exit as the two programs did that do it."""
    accept = [sys.executable, "-m", _SESSIONS, "accept", "--review", str(review), *access]
    rows = subprocess.run(accept, stdout=subprocess.PIPE, check=False)
    if rows.returncode > 1:
        raise SystemExit(rows.returncode)
    module = "etude.envserver.tasks.formats.session_command"
    write = [sys.executable, "-m", module, *words]
    done = subprocess.run(write, input=rows.stdout, check=False)
    raise SystemExit(done.returncode or rows.returncode)


@app.command(epilog=epilog("withdrawn"))
def withdrawn(  # noqa: PLR0913 - one for each option
    *,
    store: LedgerStore,
    key_store: KeyStore,
    secret: Secret,
    terms: Annotated[list[str], _TERMS],
    ledger: Ledger = "feedback",
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """List tasks of sessions whose users were erased, or do not allow them any more."""
    options = [word for each in terms for word in ("--terms", each)]
    access = write_ledger_options(store, key_store, secret, ledger, (endpoint, region))
    _run(_SESSIONS, "withdrawn", *options, *access)


imports = typer.Typer(no_args_is_help=True, help="Turn published tasks into task folders.")
app.add_typer(imports, name="import")

_OUT = typer.Option(help="Folder of the new tasks.")


@imports.command(epilog=epilog("import harbor"))
def harbor(
    folders: Annotated[list[Path], typer.Argument(help="Task folders, or folders of them.")],
    *,
    out: Annotated[Path, _OUT],
    pin: Annotated[
        bool,
        typer.Option("--pin", help="Take environment.docker_image: ask its registry for a digest."),
    ] = False,
    build: Annotated[
        str | None,
        typer.Option(
            metavar="INTO",
            help="Where images of Dockerfiles go: HOST/REPOSITORY, file:///… or s3://…; a folder"
            " of the image cache unless given.",
        ),
    ] = None,
    files: Annotated[
        bool, typer.Option("--files", help="Build nothing: environment/ is the workspace.")
    ] = False,
    credentials: _Credentials = None,
) -> None:
    """Take Harbor tasks: an image by its digest, or the Dockerfile, built by buildah as root."""
    options = [*(["--pin"] if pin else []), *(["--files"] if files else [])]
    options += ["--build", build] if build else []
    options += ["--credentials", str(credentials)] if credentials else []
    places = [str(folder) for folder in folders]
    _run("etude.envserver.tasks.formats.command", "harbor", *options, "--out", str(out), *places)


@imports.command(epilog=epilog("import swebench"))
def swebench(  # noqa: PLR0913 - a verb has as many parameters as it has options
    rows: Annotated[Path, typer.Argument(help="A JSONL file, one instance per line.")],
    *,
    repositories: Annotated[Path, typer.Option(help="Folder of mirrors or bundles.")],
    out: Annotated[Path, _OUT],
    test_command: Annotated[
        str, typer.Option(help="Runs the test files that are named behind it; pytest unless given.")
    ] = "",
    image: Annotated[
        str, typer.Option(help="Image that the tasks need; {instance} in it stands for a row's id.")
    ] = "",
    pin: Annotated[
        bool, typer.Option("--pin", help="Ask the image's registry for its digest.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that grading may take.")] = 1_800.0,
    credentials: _Credentials = None,
) -> None:
    """Take rows of SWE-bench: the test patch enters at grading, the gold patch is the solution."""
    command = ["--test-command", test_command] if test_command else []
    command += ["--pin"] if pin else []
    command += ["--credentials", str(credentials)] if credentials else []
    _run(
        "etude.envserver.tasks.formats.command",
        *("swebench", str(rows), "--repositories", str(repositories), "--out", str(out)),
        *(*command, "--image", image, "--timeout", str(timeout)),
    )


@imports.command(epilog=epilog("import verifiers"))
def verifiers(
    rows: Annotated[Path, typer.Argument(help="A JSONL file, one task's data per line.")],
    *,
    out: Annotated[Path, _OUT],
    tests: Annotated[Path | None, typer.Option(help="tests/ of every task.")] = None,
    environment: Annotated[
        Path | None, typer.Option(help="First files of every workspace.")
    ] = None,
    image: Annotated[str, typer.Option(help="Image that the tasks need.")] = "",
    files: Annotated[
        bool, typer.Option("--files", help="Of Harbor tasks that rows name, build no image.")
    ] = False,
) -> None:
    """Take rows of a verifiers taskset: their tests find each row as row.json in their folder."""
    folders = {"--tests": tests, "--environment": environment}
    given = [word for name, path in folders.items() if path for word in (name, str(path))]
    given += ["--files"] if files else []
    _run(
        "etude.envserver.tasks.formats.command",
        *("verifiers", str(rows), "--out", str(out), "--image", image, *given),
    )


@imports.command(epilog=epilog("import installed"))
def installed(
    name: Annotated[str, typer.Argument(help="Name of the format, as acme.Katas.")],
    source: Annotated[Path, typer.Argument(help="File or folder, as the format says.")],
    *,
    out: Annotated[Path, _OUT],
) -> None:
    """Take tasks in a format that an installed package registers."""
    module = "etude.envserver.tasks.formats.command"
    _run(module, "installed", name, str(source), "--out", str(out))


@app.command(epilog=epilog("traces"))
def traces(
    name: RunFolder,
    *,
    model: Annotated[
        Path | None, typer.Option(help="Folder with the tokenizer; the run's own unless given.")
    ] = None,
) -> None:
    """Print a run's rollouts as traces of the verifiers package, one JSON object per line."""
    folder = runs.folder_of(name)
    tokenizer = model or find_source_model(name)
    _run("etude.trainer.commands.traces", f"file://{folder.resolve()}", "--model", str(tokenizer))
