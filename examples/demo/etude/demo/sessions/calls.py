"""Calls that tell right programs from wrong ones, with their answers."""

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from etude.demo.sessions.programs import RAISED, Program

Words = Mapping[str, str]
Inputs = Callable[[Random, Words], list[object]]
"""Draws the arguments of one call."""

MAX_DRAWS = 80
NUM_VISIBLE = 2
NUM_HIDDEN = 6
NUM_TELLING = 4
"""Of the hidden calls of a function: those that the first files answer wrongly, where it has any
and so many are found."""


class Call(NamedTuple):
    """One call and the answer of the reference."""

    arguments: list[object]
    expected: object


class CheckedFunction(NamedTuple):
    """One function; visible calls are in the repository and pass before too, hidden ones grade."""

    path: str
    function: str
    visible: tuple[Call, ...]
    hidden: tuple[Call, ...]

    def is_answered_by(self, program: Program) -> bool:
        """True if a program answers every hidden call as the reference does."""
        return all(
            program.answer(self.path, self.function, call.arguments) == call.expected
            for call in self.hidden
        )


class Programs(NamedTuple):
    """A task's program as it is, and after the reference."""

    before: Program
    after: Program


def draw_calls(
    place: tuple[str, str], inputs: Inputs, programs: Programs, words: Words, random: Random
) -> CheckedFunction:
    """Fresh calls of the function at a path.

    Raises:
        ValueError: the reference raises, or too few calls pass before the change.
    """
    same, telling = list[Call](), list[Call]()
    for _ in range(MAX_DRAWS):
        arguments = inputs(random, words)
        expected = programs.after.answer(*place, arguments)
        if expected == RAISED:
            raise ValueError(f"the reference raises in {place} for {arguments}")
        is_same = programs.before.answer(*place, arguments) == expected
        (same if is_same else telling).append(Call(arguments, expected))
        if len(same) >= NUM_HIDDEN and len(telling) >= NUM_TELLING:
            break
    hidden = [*telling[:NUM_TELLING], *same[NUM_VISIBLE:]][:NUM_HIDDEN]
    if len(hidden) < NUM_TELLING or len(same) < NUM_VISIBLE:
        raise ValueError(f"{place} has {len(same)} calls of {MAX_DRAWS} that pass already")
    random.shuffle(hidden)
    return CheckedFunction(*place, visible=tuple(same[:NUM_VISIBLE]), hidden=tuple(hidden))
