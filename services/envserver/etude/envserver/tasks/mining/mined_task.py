"""Task folders of mutations: the broken function, a request, and the tests that it fails. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from blake3 import blake3

from etude.envserver.storage.trees import File
from etude.envserver.tasks.formats import swebench, toml
from etude.envserver.tasks.formats.git_mirror import PatchChanges
from etude.envserver.tasks.formats.imported_task import ImportedTask
from etude.envserver.tasks.mining import requests
from etude.envserver.tasks.mining.languages import MinedLanguage
from etude.envserver.tasks.mining.mutations import Mutation
from etude.envserver.tasks.mining.repository import MinedRepository

MAX_SHARE = 0.5
"""Of the tests: a change that fails more of them broke the repository, not a function."""
_MIN_LINE = 12
"""Shorter lines of a solution stand in any text."""
Files = Mapping[str, File]


class NoTaskError(Exception):
    """A mutation that makes no task; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingTests:
    """Tests that a mutation fails each time, and those that pass each time."""

    failing: tuple[str, ...]
    passing: tuple[str, ...]
    errors: Mapping[str, int]
    """Number of lines of the log that begin with an error, by its class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Settings that the tasks of a repository share."""

    language: MinedLanguage
    command: str
    image: str
    timeout_s: float
    seed: int


def make_task_id(repository: MinedRepository, mutation: Mutation, *, seed: int) -> str:
    """The id of a mutation's task: the same for the same files, mutation and seed."""
    text = f"{repository.digest}\0{mutation.key}\0{seed}"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", repository.name).strip(".-_")[:60] or "repository"
    return f"{name}-{blake3(text.encode()).hexdigest()[:10]}"


def check_failing(failing: frozenset[str], passing: frozenset[str], stable: frozenset[str]) -> None:
    """Check that a mutation fails some tests and not too many.

    Raises:
        NoTaskError: it does not.
    """
    if not failing:
        raise NoTaskError("no test fails each time")
    if not passing:
        raise NoTaskError("no test passes any more")
    if len(failing) > MAX_SHARE * len(stable):
        raise NoTaskError(f"{len(failing)} of {len(stable)} tests fail, more than half")


def build_task(
    task_id: str,
    mutation: Mutation,
    repository: MinedRepository,
    found: FailingTests,
    settings: TaskSettings,
) -> ImportedTask:
    """The task of a mutation, in Harbor layout.

    Raises:
        NoTaskError: the failing tests stand in files that cannot be hidden.
    """
    path = mutation.function.path
    original = repository.files[path]
    hidden = hide_tests(found.failing, repository, settings.language)
    broken = original._replace(content=mutation.apply(original.content))
    workspace = {name: file for name, file in repository.workspace.items() if name not in hidden}
    files = {f"environment/{name}": file for name, file in (workspace | {path: broken}).items()}
    files |= swebench.grading_files(
        PatchChanges({name: repository.files[name] for name in hidden}, ()),
        fail_to_pass=found.failing,
        pass_to_pass=found.passing,
        command=settings.command,
        log_form=settings.language.log_form,
    )
    files |= swebench.solution_files(PatchChanges({path: original}, ()))
    secrets = _secrets(mutation, original.content, found.failing)
    request = requests.write_request(mutation, found.errors, secrets, seed=settings.seed)
    files["instruction.md"] = File(request.encode() + b"\n")
    files["task.toml"] = File(_write_settings(mutation, repository, settings).encode())
    return ImportedTask(task_id, files, ())


def hide_tests(
    failing: tuple[str, ...], repository: MinedRepository, language: MinedLanguage
) -> tuple[str, ...]:
    """Files of the failing tests, or all files of tests if their names do not tell.

    Raises:
        NoTaskError: there is no file of tests.
    """
    every = sorted(path for path in repository.files if language.is_test(path))
    named = {test.partition("::")[0] for test in failing}
    hidden = tuple(sorted(named)) if named <= {*every} else tuple(every)
    if not hidden:
        raise NoTaskError("its tests stand in files of the source, which cannot be hidden")
    return hidden


def _secrets(mutation: Mutation, original: bytes, failing: tuple[str, ...]) -> list[str]:
    """Texts that a request must not hold."""
    functions = {re.sub(r"\[.*", "", test).rpartition("::")[2] for test in failing}
    replaced = original[mutation.start : mutation.end].decode(errors="replace").splitlines()
    lines = {line.strip() for line in replaced if len(line.strip()) >= _MIN_LINE}
    return sorted(functions | lines)


def _write_settings(mutation: Mutation, repository: MinedRepository, settings: TaskSettings) -> str:
    metadata = {
        "category": "mined",
        "repo": repository.name,
        "base_commit": repository.commit,
        "function": f"{mutation.function.path}:{mutation.function.name}",
        "mutation": mutation.kind,
    }
    if settings.image:
        metadata["etude_image"] = settings.image
    return toml.write_toml(
        {
            "schema_version": "1.4",
            "source": "mined",
            "metadata": metadata,
            "verifier": {"timeout_sec": settings.timeout_s},
            "environment": {"network_mode": "no-network"},
        }
    )
