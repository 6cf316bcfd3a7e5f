"""One problem: a repository, the tests that see its bug, and what the user says about it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from etude.demo import cases, repositories
from etude.demo.cases import Cases
from etude.demo.repositories import Function, Repository

TEST_FILE = "tests/test_repo.py"


class Issue(StrEnum):
    """Amount of information in the issue text."""

    FUNCTION = "function"
    FILE = "file"
    NOTHING = "nothing"


ISSUES = {Issue.FUNCTION: 0.45, Issue.FILE: 0.30, Issue.NOTHING: 0.25}
"""Share of each kind: most issues are under-specified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything that a task folder or a demonstration is made from."""

    repository: Repository
    cases: tuple[Cases, ...]
    """One per function, in order."""
    issue: Issue

    @property
    def instruction(self) -> str:
        """The issue text."""
        target = self.repository.target
        match self.issue:
            case Issue.FUNCTION:
                return f"Fix {target.name}."
            case Issue.FILE:
                return f"Bug in {target.path}."
            case Issue.NOTHING:
                return "A test fails."

    def workspace(self) -> dict[str, bytes]:
        """The files that the agent finds: the package and its visible tests."""
        files = {path: text.encode() for path, text in self.repository.sources().items()}
        files[TEST_FILE] = self.visible_tests().encode()
        return files

    def visible_tests(self) -> str:
        """A pytest file; each test imports its own module, so a broken file fails only its own."""
        pairs = zip(self.repository.functions, self.cases, strict=True)
        return "\n\n".join(_test(function, known) for function, known in pairs)

    def is_sound(self) -> bool:
        """True if the bug is unique text, fails visible and hidden tests, and its repair passes."""
        target = self.repository.target
        known = self.cases[self.repository.broken]
        wrong = target.source(self.repository.bug)
        return (
            wrong.count(target.text(self.repository.bug.text).strip()) == 1
            and not cases.passes(wrong, target.name, known.visible)
            and not cases.passes(wrong, target.name, known.hidden)
            and self.is_solved_by(target.source())
        )

    def is_solved_by(self, source: str) -> bool:
        """True if this text of the broken file passes its visible and hidden tests."""
        known = self.cases[self.repository.broken]
        return cases.passes(source, self.repository.target.name, (*known.visible, *known.hidden))


def _test(function: Function, known: Cases) -> str:
    lines = [f"def test_{function.name}():"]
    module = function.path.removesuffix(".py").replace("/", ".")
    lines.append(f"    from {module} import {function.name}")
    for case in known.visible:
        arguments = ", ".join(repr(value) for value in case.arguments)
        lines.append(f"    assert {function.name}({arguments}) == {case.expected!r}")
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Source:
    """Problems of one seed, none of them twice, whatever the split."""

    seed: int
    seen: set[str] = field(default_factory=set)
    num_duplicates: int = 0
    num_unsound: int = 0

    def take(self, split: str, count: int) -> Iterator[Problem]:
        """The next problems of a split; each split draws from its own range of seeds."""
        draw = 0
        while count > 0:
            # Reproducible on purpose: the seed is the whole identity of a task set.
            random = Random(f"etude/{self.seed}/{split}/{draw}")  # noqa: S311
            problem = _draw(random)
            draw += 1
            if problem.repository.identity in self.seen:
                self.num_duplicates += 1
            elif not problem.is_sound():
                self.num_unsound += 1
            else:
                self.seen.add(problem.repository.identity)
                count -= 1
                yield problem


def _draw(random: Random) -> Problem:
    repository = repositories.draw(random)
    known = tuple(cases.draw(random, function) for function in repository.functions)
    issue = random.choices(list(ISSUES), weights=list(ISSUES.values()))[0]
    return Problem(repository=repository, cases=known, issue=issue)
