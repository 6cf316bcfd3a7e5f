"""The 20 verbs: what each function means, and the 56 ways in which it can be wrong."""

from enum import StrEnum
from typing import NamedTuple


class BugClass(StrEnum):
    """Kind of mistake in a buggy line."""

    OFF_BY_ONE = "off_by_one"
    VARIABLE = "variable"
    CONSTANT = "constant"
    OPERATOR = "operator"
    CONDITION = "condition"
    MISSING_RETURN = "missing_return"


FREQUENCIES = {
    BugClass.OFF_BY_ONE: 0.22,
    BugClass.VARIABLE: 0.20,
    BugClass.CONSTANT: 0.17,
    BugClass.OPERATOR: 0.17,
    BugClass.CONDITION: 0.14,
    BugClass.MISSING_RETURN: 0.10,
}
"""Share of the tasks that have each class of bug."""


class Bug(NamedTuple):
    """One wrong form of one line."""

    line: int
    kind: BugClass
    text: str


class Verb(NamedTuple):
    """One meaning: the right body, how to call it, and its known mistakes.

    Lines name the slots {a} and {b} (numbers) and {xs} (a list), and carry their indentation below
    that of the body.
    """

    name: str
    slots: tuple[str, ...]
    body: tuple[str, ...]
    cases: str
    """Family of inputs that tells every mistake from the right body."""
    bugs: tuple[Bug, ...]

    def alternatives(self, line: int) -> tuple[str, ...]:
        """Every known wrong form of a line, in table order."""
        return tuple(bug.text for bug in self.bugs if bug.line == line)


AB, A, XS, XSB = ("a", "b"), ("a",), ("xs",), ("xs", "b")
OFF, VAR, CON, OPE, IFS, MIS = BugClass

VERBS = (
    Verb(
        "add",
        AB,
        ("return {a} + {b}",),
        "pairs",
        (
            Bug(0, OPE, "return {a} - {b}"),
            Bug(0, VAR, "return {a} + {a}"),
            Bug(0, MIS, "{a} + {b}"),
        ),
    ),
    Verb(
        "sub",
        AB,
        ("return {a} - {b}",),
        "pairs",
        (
            Bug(0, OPE, "return {a} + {b}"),
            Bug(0, VAR, "return {a} - {a}"),
            Bug(0, MIS, "{a} - {b}"),
        ),
    ),
    Verb(
        "area",
        AB,
        ("return {a} * {b}",),
        "pairs",
        (Bug(0, OPE, "return {a} + {b}"), Bug(0, VAR, "return {b} * {b}")),
    ),
    Verb(
        "double",
        A,
        ("return {a} * 2",),
        "numbers",
        (
            Bug(0, CON, "return {a} * 3"),
            Bug(0, OPE, "return {a} + 2"),
            Bug(0, MIS, "{a} * 2"),
        ),
    ),
    Verb(
        "half",
        A,
        ("return {a} // 2",),
        "numbers",
        (
            Bug(0, CON, "return {a} // 3"),
            Bug(0, CON, "return {a} // 4"),
            Bug(0, OPE, "return {a} * 2"),
        ),
    ),
    Verb(
        "next",
        A,
        ("return {a} + 1",),
        "numbers",
        (Bug(0, OFF, "return {a} + 2"), Bug(0, OPE, "return {a} - 1")),
    ),
    Verb(
        "total",
        XS,
        ("total = 0", "for v in {xs}:", "    total += v", "return total"),
        "lists",
        (
            Bug(0, CON, "total = 1"),
            Bug(1, OFF, "for v in {xs}[1:]:"),
            Bug(1, OFF, "for v in {xs}[:-1]:"),
            Bug(2, OPE, "    total -= v"),
            Bug(3, VAR, "return v"),
        ),
    ),
    Verb(
        "count",
        XS,
        ("count = 0", "for v in {xs}:", "    count += 1", "return count"),
        "lists",
        (
            Bug(0, CON, "count = 1"),
            Bug(1, OFF, "for v in {xs}[1:]:"),
            Bug(2, CON, "    count += 2"),
            Bug(2, VAR, "    count += v"),
            Bug(3, VAR, "return v"),
        ),
    ),
    Verb(
        "above",
        AB,
        ("return {a} > {b}",),
        "comparisons",
        (Bug(0, IFS, "return {a} >= {b}"), Bug(0, MIS, "{a} > {b}")),
    ),
    Verb(
        "below",
        AB,
        ("return {a} < {b}",),
        "comparisons",
        (
            Bug(0, IFS, "return {a} <= {b}"),
            Bug(0, IFS, "return {a} > {b}"),
            Bug(0, VAR, "return {a} < {a}"),
        ),
    ),
    Verb(
        "max",
        AB,
        ("return {a} if {a} > {b} else {b}",),
        "pairs",
        (
            Bug(0, IFS, "return {a} if {a} < {b} else {b}"),
            Bug(0, VAR, "return {a} if {a} > {b} else {a}"),
        ),
    ),
    Verb(
        "min",
        AB,
        ("return {a} if {a} < {b} else {b}",),
        "pairs",
        (
            Bug(0, IFS, "return {a} if {a} > {b} else {b}"),
            Bug(0, VAR, "return {b} if {a} < {b} else {b}"),
        ),
    ),
    Verb(
        "first",
        XS,
        ("return {xs}[0]",),
        "lists",
        (Bug(0, OFF, "return {xs}[1]"), Bug(0, CON, "return {xs}[-1]")),
    ),
    Verb(
        "last",
        XS,
        ("return {xs}[-1]",),
        "lists",
        (Bug(0, OFF, "return {xs}[-2]"), Bug(0, CON, "return {xs}[0]")),
    ),
    Verb(
        "take",
        XSB,
        ("return {xs}[:{b}]",),
        "slices",
        (
            Bug(0, OFF, "return {xs}[:{b} + 1]"),
            Bug(0, OFF, "return {xs}[:{b} - 1]"),
            Bug(0, OPE, "return {xs}[{b}:]"),
        ),
    ),
    Verb(
        "skip",
        XSB,
        ("return {xs}[{b}:]",),
        "slices",
        (
            Bug(0, OFF, "return {xs}[{b} + 1:]"),
            Bug(0, OFF, "return {xs}[{b} - 1:]"),
            Bug(0, OPE, "return {xs}[:{b}]"),
        ),
    ),
    Verb(
        "even",
        A,
        ("return {a} % 2 == 0",),
        "numbers",
        (
            Bug(0, CON, "return {a} % 2 == 1"),
            Bug(0, CON, "return {a} % 3 == 0"),
            Bug(0, IFS, "return {a} % 2 != 0"),
            Bug(0, MIS, "{a} % 2 == 0"),
        ),
    ),
    Verb(
        "steps",
        A,
        ("return list(range({a}))",),
        "numbers",
        (
            Bug(0, OFF, "return list(range({a} + 1))"),
            Bug(0, OFF, "return list(range({a} - 1))"),
        ),
    ),
    Verb(
        "cap",
        AB,
        ("if {a} > {b}:", "    {a} = {b}", "return {a}"),
        "pairs",
        (Bug(0, IFS, "if {a} < {b}:"), Bug(2, VAR, "return {b}")),
    ),
    Verb(
        "same",
        AB,
        ("return {a} == {b}",),
        "comparisons",
        (
            Bug(0, IFS, "return {a} != {b}"),
            Bug(0, VAR, "return {a} == {a}"),
            Bug(0, MIS, "{a} == {b}"),
        ),
    ),
)
