"""The golden run: all calls, in the order in which they are made."""

from collections.abc import Iterator

from tests.harness.golden import edits, runs, views
from tests.harness.golden.calls import Turn


def turns() -> Iterator[Turn]:
    """All of it."""
    for part in (
        views.reads,
        views.lists,
        views.searches,
        edits.replacements,
        edits.writes,
        edits.patches,
        edits.lints,
        edits.todos,
        runs.commands,
        runs.checks,
        runs.background,
        views.mistakes,
    ):
        yield from part()


TURNS = tuple(turns())
NUM_CALLS = sum(len(turn) for turn in TURNS)
