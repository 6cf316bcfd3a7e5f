"""One session task: workspace, request, reference, calls that grade, answer for judges."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from etude.demo.sessions import calls, families, logs
from etude.demo.sessions.calls import CheckedFunction, Programs
from etude.demo.sessions.changes import FileChange, read_changes
from etude.demo.sessions.families import FAMILIES, Family
from etude.demo.sessions.programs import Program

MAX_REQUEST_CHARS = 400
NUM_MODULES = 9
"""Modules of a task in which the cause shows, of ten: about 160 changed lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTask:
    """Everything that a task folder is made from."""

    family: Family
    package: str
    request: str
    symptom: str
    """Module that the user complains of; the cause is in another."""
    changes: tuple[FileChange, ...]
    """Files of package and docs; most are changed by the reference."""
    logs: Mapping[str, str]
    functions: tuple[CheckedFunction, ...]

    @property
    def cause(self) -> str:
        """Path of the module of the cause."""
        return f"{self.package}/{self.family.cause}.py"

    @property
    def reference(self) -> dict[str, str]:
        """The reference's files by path: those that it changes."""
        return {each.path: each.after for each in self.changes if each.is_changed}

    def workspace(self) -> dict[str, str]:
        """The files that the agent finds, by path."""
        files = {each.path: each.before for each in self.changes} | dict(self.logs)
        return files | {f"{self.package}/__init__.py": "", **self.visible_tests()}

    def visible_tests(self) -> dict[str, str]:
        """A test file for each module; all pass before the change too."""
        by_path: dict[str, str] = {}
        for each in self.functions:
            name = each.path.removesuffix(".py").rpartition("/")[2]
            path = f"tests/test_{name}.py"
            by_path[path] = by_path.get(path, "") + _test(each)
        return by_path

    def answer(self) -> str:
        """The curated answer, against which quality is judged."""
        changed = "".join(f"- {path}\n" for path in self.reference)
        return (
            f"# Cause\n\n{self.family.explanation}\n\n# Files\n\nThe cause is in {self.cause}."
            f" The reference changes\n\n{changed}\nThe errors of gateway, mailer, search and disk"
            " in logs/ have nothing to do with it.\n"
        )

    def is_solved_by(self, files: Mapping[str, str]) -> bool:
        """True if these files, over those of the workspace, answer every hidden call."""
        program = Program(self.workspace() | dict(files))
        return all(each.is_answered_by(program) for each in self.functions)

    def is_sound(self) -> bool:
        """True if the reference passes, and lacking any one of its files it does not."""
        reference = self.reference
        return (
            len(self.request) <= MAX_REQUEST_CHARS
            and self.is_solved_by(reference)
            and not any(
                self.is_solved_by({path: text for path, text in reference.items() if path != left})
                for left in reference
            )
        )


def _test(checked: CheckedFunction) -> str:
    module = checked.path.removesuffix(".py").replace("/", ".")
    lines = [f"def test_{checked.function}():"]
    lines.append(f"    from {module} import {checked.function}")
    for call in checked.visible:
        arguments = ", ".join(repr(value) for value in call.arguments)
        lines.append(f"    assert {checked.function}({arguments}) == {call.expected!r}")
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class SessionSource:
    """Tasks of one seed, none of them twice, whatever the split."""

    seed: int
    num_unsound: int = 0
    _requests: set[tuple[str, str, str]] = field(default_factory=set)

    def take(self, split: str, count: int) -> Iterator[SessionTask]:
        """The next tasks of a split; each split draws from its own range of seeds."""
        number = 0
        while count > 0:
            # Reproducible on purpose: the seed is the whole identity of a task set.
            random = Random(f"etude/{self.seed}/sessions/{split}/{number}")  # noqa: S311
            number += 1
            task = draw_task(random)
            identity = (task.family.name, task.package, task.request)
            if identity in self._requests:
                continue
            if not task.is_sound():
                self.num_unsound += 1
                continue
            self._requests.add(identity)
            count -= 1
            yield task


def draw_task(random: Random) -> SessionTask:
    """A task of a family drawn evenly, with its words, modules, symptom and calls."""
    family = random.choice(FAMILIES)
    words = families.draw_words(family, random)
    shows = sorted(random.sample(sorted(family.symptoms), NUM_MODULES))
    symptom = random.choice(shows)
    hidden = {f"{words['package']}/{name}.py" for name in family.symptoms.keys() - set(shows)}
    changes = tuple(each for each in read_changes(family.name, words) if each.path not in hidden)
    programs = Programs(
        before=Program({each.path: each.before for each in changes}),
        after=Program({each.path: each.after for each in changes}),
    )
    functions = tuple(
        calls.draw_calls(
            (f"{words['package']}/{module}.py", name.format_map(words)),
            inputs,
            programs,
            words,
            random,
        )
        for module in shows
        for name, inputs in family.inputs[module].items()
    )
    return SessionTask(
        family=family,
        package=words["package"],
        request=families.draw_request(family, symptom, words, random),
        symptom=symptom,
        changes=changes,
        logs=logs.draw_logs(family.clues, words, random),
        functions=functions,
    )
