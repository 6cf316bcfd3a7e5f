"""Inputs that tell right functions from wrong ones, and what a function answers to them."""

from collections.abc import Callable, Sequence
from random import Random
from types import CodeType
from typing import NamedTuple

from etude.demo.repositories import Function

Value = int | bool | list[int] | None
Arguments = tuple[Value, ...]

NUM_VISIBLE = 2


class Case(NamedTuple):
    """One call and the answer of the right function."""

    arguments: Arguments
    expected: Value


class Cases(NamedTuple):
    """The cases of one function; visible ones are in the repository, hidden ones grade."""

    visible: tuple[Case, ...]
    hidden: tuple[Case, ...]


def _pair(random: Random, shape: str) -> Arguments:
    low = random.randint(3, 20)
    high = low + random.randint(1, 20)
    return {"lt": (low, high), "gt": (high, low), "eq": (low, low)}[shape]


def _pairs(random: Random) -> list[Arguments]:
    return [_pair(random, shape) for shape in ("lt", "gt", "lt", "gt", "eq", "lt", "gt", "eq")]


def _comparisons(random: Random) -> list[Arguments]:
    return [_pair(random, shape) for shape in ("eq", "lt", "eq", "lt", "gt", "eq", "lt", "gt")]


def _numbers(random: Random) -> list[Arguments]:
    # Even but no multiple of 3, then an odd multiple of 3: tells n % 2 from n % 3 both ways.
    even, odd = random.choice((4, 8, 10, 14, 16, 20)), random.choice((3, 9, 15, 21))
    hidden = [random.choice((22, 26, 28)), random.choice((27, 33)), *random.sample(range(4, 40), 4)]
    return [(number,) for number in (even, odd, *hidden)]


def _numbers_of_a_list(random: Random, length: int) -> list[int]:
    # Larger than any length here and all different, so that no answer is right by accident.
    return random.sample(range(7, 60), length)


def _lists(random: Random) -> list[Arguments]:
    return [(_numbers_of_a_list(random, length),) for length in (3, 4, 2, 3, 4, 5, 6, 4)]


def _slices(random: Random) -> list[Arguments]:
    shapes = ((4, 2), (5, 1), (3, 1), (4, 3), (5, 2), (6, 4), (4, 1), (6, 3))
    return [(_numbers_of_a_list(random, length), cut) for length, cut in shapes]


FAMILIES: dict[str, Callable[[Random], list[Arguments]]] = {
    "pairs": _pairs,
    "comparisons": _comparisons,
    "numbers": _numbers,
    "lists": _lists,
    "slices": _slices,
}


def draw(random: Random, function: Function) -> Cases:
    """Fresh inputs for a function, with the answers of its right body."""
    inputs = FAMILIES[function.verb.cases](random)
    cases = tuple(
        Case(arguments, answer)
        for arguments, answer in zip(
            inputs, answers(function.source(), function.name, inputs), strict=True
        )
    )
    return Cases(cases[:NUM_VISIBLE], cases[NUM_VISIBLE:])


def answers(source: str, name: str, inputs: Sequence[Arguments]) -> list[Value]:
    """Answers of the function of this source to each input; None where it raises.

    Runs the source in this process: only for sources that the generator's own table can produce.
    """
    namespace: dict[str, Callable[..., Value]] = {}
    code: CodeType = compile(source, "<generated>", "exec")
    exec(code, namespace)  # noqa: S102 - the table's own text, see above
    return [_answer(namespace[name], arguments) for arguments in inputs]


def _answer(function: Callable[..., Value], arguments: Arguments) -> Value:
    try:
        return function(*arguments)
    except (IndexError, NameError, TypeError):
        return None


def passes(source: str, name: str, cases: Sequence[Case]) -> bool:
    """True if the function of this source gives every expected answer."""
    given = answers(source, name, [case.arguments for case in cases])
    return all(
        answer == case.expected and answer is not None
        for answer, case in zip(given, cases, strict=True)
    )
