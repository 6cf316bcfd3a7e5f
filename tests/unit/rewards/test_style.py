"""Style of a change: size, new lints and unformatted lines, each bounded."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.tools import lints
from etude.common.api.run.rewards import StyleParameters
from etude.rewards.functions import style
from etude.rewards.functions.style import StyleFigures, count_changed_lines
from etude.v1 import environments_pb2

ORIGINAL = b"import os\n\n\ndef join(a, b):\n    return os.path.join(a, b)\n"
PARAMETERS = StyleParameters.model_validate(
    {"freeLines": 2, "maxLines": 10, "maxLints": 4, "maxUnformattedLines": 8}
)


def diff(**files: bytes) -> environments_pb2.WorkspaceDiff:
    change = environments_pb2.WorkspaceDiff()
    for name, content in files.items():
        change.written.add(path=f"{name}.py", content=content)
    return change


async def figures(**files: bytes) -> StyleFigures:
    return await style.measure_style(diff(**files), {"a.py": ORIGINAL}, has_image=False)


async def test_a_clean_change_has_its_size_alone() -> None:
    after = ORIGINAL.replace(b"join(a, b)\n", b"join(b, a)\n")
    assert await figures(a=after) == StyleFigures(2, 0, 0)


async def test_new_lints_and_unformatted_lines_count_beyond_those_of_the_original() -> None:
    dirty = b"import sys,os\n" + ORIGINAL
    found = await figures(a=dirty)
    assert found.new_lints >= 1
    assert found.unformatted_lines >= 1
    same = await style.measure_style(
        diff(a=dirty + b"\n\nx = 1\n"), {"a.py": dirty}, has_image=False
    )
    assert (same.new_lints, same.unformatted_lines) == (0, 0)


async def test_a_file_that_is_too_large_for_the_linter_counts_in_full() -> None:
    found = await figures(big=b"x = 1\n" * 200_000)
    assert style.penalty(found, PARAMETERS) == 1


async def test_a_change_of_too_many_python_files_is_worst_without_running_the_linter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = {f"f{i}": b"x = 1\n" for i in range(style.MAX_CHECKED_FILES + 1)}
    # A path without ruff: running it would raise.
    monkeypatch.setattr(lints, "_executable", lambda: "/no/ruff")
    lints._jail.cache_clear()
    assert await figures(**many) == StyleFigures(len(many), math.inf, math.inf)


async def test_a_file_that_the_linter_cannot_read_ends_the_checks_but_not_the_size() -> None:
    found = await figures(a=b"x = 1\n" * 200_000, b=b"x=1\n" * 3)
    assert found == StyleFigures(200_000 + len(ORIGINAL.splitlines()) + 3, math.inf, math.inf)


async def test_files_that_only_an_image_has_are_left_out() -> None:
    change = diff(a=ORIGINAL + b"x=1\n", hidden=b"x=1\n" * 50)
    change.deleted.append("gone.py")
    found = await style.measure_style(change, {"a.py": ORIGINAL}, has_image=True)
    assert found.changed_lines == 1


def test_the_three_parts_are_capped_and_weighted() -> None:
    assert style.penalty(StyleFigures(2, 0, 0), PARAMETERS) == 0
    assert style.penalty(StyleFigures(7, 2, 2), PARAMETERS) == pytest.approx((0.5 + 0.5 + 0.25) / 3)
    assert style.penalty(StyleFigures(math.inf, math.inf, math.inf), PARAMETERS) == 1
    sized = PARAMETERS.model_copy(
        update={"weights": PARAMETERS.weights.model_copy(update={"lints": 0, "formatting": 0})}
    )
    assert style.penalty(StyleFigures(7, 99, 99), sized) == 0.5


AMOUNT = st.floats(0, 1e9)


@given(less=st.tuples(AMOUNT, AMOUNT, AMOUNT), more=st.tuples(AMOUNT, AMOUNT, AMOUNT))
def test_more_of_anything_never_lowers_the_penalty(
    less: tuple[float, float, float], more: tuple[float, float, float]
) -> None:
    larger = StyleFigures(*(a + b for a, b in zip(less, more, strict=True)))
    before, after = (style.penalty(f, PARAMETERS) for f in (StyleFigures(*less), larger))
    assert 0 <= before <= after <= 1


LINES = st.lists(st.sampled_from([b"a", b"b", b"c", b""]), max_size=8)


@given(old=LINES, new=LINES, padding=st.lists(st.just(b"# pad"), max_size=4))
def test_padding_makes_a_change_larger(
    old: list[bytes], new: list[bytes], padding: list[bytes]
) -> None:
    before, after, padded = (
        b"".join(line + b"\n" for line in x) for x in (old, new, new + padding)
    )
    assert count_changed_lines(before, before) == 0
    assert count_changed_lines(before, after) == count_changed_lines(after, before)
    assert count_changed_lines(before, padded) == count_changed_lines(before, after) + len(padding)
