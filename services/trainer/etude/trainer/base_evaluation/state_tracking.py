"""State tracking: the value of a variable after assignments and swaps."""

import random

from etude.trainer.base_evaluation.questions import Question

NAMES = ("a", "b", "c", "d", "e")
LENGTHS = (2, 4, 8, 16, 32)
"""Statements after the first assignments."""
_DIGITS = tuple(str(digit) for digit in range(10))
PROGRAM = "{}"
"""Prompt of a program."""


def make_programs(length: int, *, count: int, seed: int) -> list[Question]:
    """Make programs in Python that print a variable, with its value among those of all variables.

    The same for the same seed. Values of variables are different digits, and statements are copies
    and swaps of two of them; the one that is printed was changed by the last statement.
    """
    draw = random.Random(f"{seed}/{length}")  # noqa: S311 - made tasks
    return [_make_program(draw, length) for _ in range(count)]


def _make_program(draw: random.Random, length: int) -> Question:
    choices = tuple(draw.sample(_DIGITS, len(NAMES)))
    values = dict(zip(NAMES, choices, strict=True))
    lines = [f"{name} = {value}" for name, value in values.items()]
    printed = NAMES[0]
    for _ in range(length):
        printed, other = draw.sample(NAMES, 2)
        if draw.random() < 0.5:
            values[printed] = values[other]
            lines.append(f"{printed} = {other}")
        else:
            values[printed], values[other] = values[other], values[printed]
            lines.append(f"{printed}, {other} = {other}, {printed}")
    program = "\n".join([*lines, f"print({printed})", "# prints"])
    return Question(question=program, choices=choices, answer=choices.index(values[printed]))
