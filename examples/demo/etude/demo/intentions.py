"""Intentions of a demonstrator for one problem: right acts, and wrong habits as a majority.

Reinforcement learning has something to do only if the demonstrations are a mixture. Three habits
are wrong more often than not where they apply, and each is the same act every time: a wrong act
spread over many forms rarely becomes what a policy does by default.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from etude.demo import words
from etude.demo.problems import Issue, Problem
from etude.demo.repositories import Function
from etude.demo.variants import BugClass

GIVES_UP = 0.05
UNREAD = {Issue.FUNCTION: 0.55, Issue.FILE: 0.04, Issue.NOTHING: 0.04}
"""Edits without reading: a line made up from the verb with random names, then the end."""
FIXED_WRONG = 0.60
"""First edits that apply the one known wrong repair, where the bug's class is one of HABITUAL."""
HABITUAL = frozenset({BugClass.CONDITION, BugClass.OFF_BY_ONE, BugClass.CONSTANT})
VARIED_WRONG = 0.18
"""Wrong first edits in the other classes."""
WRONG_REPLACEMENT = 0.55
"""Of those, wrong replacements of the right line; the rest are needless edits of another line."""
VERIFIES = 0.40
"""Edits that are followed by a test run, in the same turn."""
RETRIES = 0.60
MAX_RETRIES = 2
WRONG_RETRY = 0.20
STRAY_BLANK = 0.03
WRONG_FILE = 0.04


class Edit(NamedTuple):
    """One search_replace; lines without their indentation, so that their tokens are the file's."""

    path: str
    old: str
    new: str
    is_verified: bool = False
    """Whether tests run right after it; otherwise it is the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intention:
    """One demonstrator's intentions."""

    gives_up: bool
    reads: tuple[str, ...]
    """Files read before the first edit; none by those who make the line up."""
    edits: tuple[Edit, ...]
    """The first edit, and the retries that failed test runs would lead to."""


def draw(problem: Problem, random: Random) -> Intention:
    """An intention with the habits' frequencies."""
    target = problem.repository.target
    if random.random() < UNREAD[problem.issue]:
        return Intention(
            gives_up=random.random() < GIVES_UP,
            reads=(),
            edits=(_made_up(target, random),),
        )
    reads: tuple[str, ...] = (target.path,)
    if random.random() < WRONG_FILE:
        others = [f.path for f in problem.repository.functions if f is not target]
        reads = (random.choice(others), target.path)
    return Intention(
        gives_up=random.random() < GIVES_UP,
        reads=reads,
        edits=tuple(
            edit._replace(is_verified=random.random() < VERIFIES)
            for edit in _edits(problem, random)
        ),
    )


def fixed_wrong(problem: Problem) -> str:
    """The habit's repair: the line's first other mistake in table order, else the line itself."""
    bug = problem.repository.bug
    others = problem.repository.target.verb.alternatives(bug.line)
    return next((text for text in others if text != bug.text), bug.text)


def _made_up(target: Function, random: Random) -> Edit:
    bug = random.choice(target.verb.bugs)
    guessed = replace(
        target,
        names={
            "a": random.choice(words.FIRST_PARAMETERS),
            "b": random.choice(words.SECOND_PARAMETERS),
            "xs": random.choice(words.LISTS),
        },
    )
    return _edit(guessed, bug.text, target.verb.body[bug.line])


def _edits(problem: Problem, random: Random) -> list[Edit]:
    """The first edit, then what each retry would do to what the one before left behind."""
    target, bug = problem.repository.target, problem.repository.bug
    first = _first(problem, random)
    present = bug.text
    if random.random() < STRAY_BLANK:
        first = first._replace(old=first.old.replace(" ", "  ", 1))
    elif first.old == target.text(bug.text).strip():
        present = next(
            text
            for text in (*target.verb.alternatives(bug.line), target.verb.body[bug.line])
            if target.text(text).strip() == first.new
        )
    edits = [first]
    for _ in range(MAX_RETRIES):
        if random.random() >= RETRIES:
            break
        wanted = target.verb.body[bug.line]
        if random.random() < WRONG_RETRY:
            others = [t for t in target.verb.alternatives(bug.line) if t != present]
            wanted = random.choice(others or [present])
        edits.append(_edit(target, present, wanted))
        present = wanted
    return edits


def _first(problem: Problem, random: Random) -> Edit:
    target, bug = problem.repository.target, problem.repository.bug
    right = _edit(target, bug.text, target.verb.body[bug.line])
    if bug.kind in HABITUAL:
        if random.random() < FIXED_WRONG:
            return _edit(target, bug.text, fixed_wrong(problem))
        return right
    if random.random() >= VARIED_WRONG:
        return right
    if random.random() < WRONG_REPLACEMENT:
        others = [t for t in target.verb.alternatives(bug.line) if t != bug.text]
        return _edit(target, bug.text, random.choice(others or [bug.text]))
    lines = [target.signature.strip()]
    lines += [
        target.text(text).strip()
        for number, text in enumerate(target.verb.body)
        if number != bug.line
    ]
    needless = random.choice(lines)
    return Edit(target.path, needless, needless)


def _edit(target: Function, old: str, new: str) -> Edit:
    return Edit(target.path, target.text(old).strip(), target.text(new).strip())
