"""Exact replacement: once, everywhere, or not at all with a hint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.tool_calls import ParsedCall
from etude.agent.tools import search_replace
from etude.agent.tools.base import ErrorKind, ToolOutcome
from etude.agent.toolsets import run_calls, toolset
from etude.agent.workspace import ExecResult, MemoryWorkspace

SOURCE = b"def add(a, b):\n    total = a + b\n    return total\n"
small = st.text(alphabet="ab\n", max_size=12)


async def no_shell(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(f"no command should run: {command} {timeout_s}")


async def change(workspace: MemoryWorkspace, **arguments: object) -> ToolOutcome:
    call = ParsedCall(name="search_replace", arguments=arguments)
    (outcome,) = await run_calls(toolset("Standard"), workspace, [call])
    return outcome


@given(small, small.filter(bool), small)
def test_one_match_is_replaced_as_by_str_replace(text: str, old: str, new: str) -> None:
    try:
        edited = search_replace.replace(text.encode(), old, new)
    except search_replace.NoMatchError:
        assert text.count(old) == 0
    except search_replace.AmbiguousError:
        assert text.count(old) > 1
    else:
        assert text.count(old) == 1
        assert edited.data.decode() == text.replace(old, new)


@given(small, small.filter(bool), small)
def test_all_matches_are_replaced_as_by_str_replace(text: str, old: str, new: str) -> None:
    try:
        edited = search_replace.replace(text.encode(), old, new, replace_all=True)
    except search_replace.NoMatchError:
        assert old not in text
    else:
        assert edited.data.decode() == text.replace(old, new)
        assert len(edited.starts) == text.count(old)


def test_a_file_with_dos_line_ends_keeps_them() -> None:
    edited = search_replace.replace(b"\xef\xbb\xbfone\r\ntwo\r\nthree\r\n", "one\ntwo", "1\n2")
    assert edited.data == b"\xef\xbb\xbf1\r\n2\r\nthree\r\n"


def test_a_file_with_mixed_line_ends_is_matched_literally() -> None:
    assert search_replace.replace(b"a\r\nb\nc", "b\nc", "x\ny").data == b"a\r\nx\ny"
    with pytest.raises(search_replace.NoMatchError):
        search_replace.replace(b"a\r\nb\nc", "a\nb", "x")


def test_bytes_that_are_no_text_stay_as_they_are() -> None:
    assert search_replace.replace(b"\xff a \xfe", "a", "b").data == b"\xff b \xfe"


def test_an_ambiguous_match_names_its_lines() -> None:
    with pytest.raises(search_replace.AmbiguousError, match="matches 3 times, at lines 1, 2, 4"):
        search_replace.replace(b"x\nx\ny\nx\n", "x", "z")


def test_a_missing_match_names_the_nearest_line() -> None:
    with pytest.raises(search_replace.NoMatchError, match="nearest line is 2: total = a \\+ b"):
        search_replace.replace(SOURCE, "  total = a + c\n  return", "x")


def test_a_missing_match_of_several_lines_names_the_first_that_differs() -> None:
    source = b"if a:\n    x()\nif a:\n    y()\n    z()\n"
    with pytest.raises(search_replace.NoMatchError, match=r"; line 3 of it is not line 5: z\(\)$"):
        search_replace.replace(source, "if a:\n    y()\n    zz()\n", "x")


def test_a_missing_match_with_a_typo_names_the_nearest_line() -> None:
    with pytest.raises(search_replace.NoMatchError, match="nearest line is 3: return total"):
        search_replace.replace(SOURCE, "    retrn total", "x")


def test_a_missing_match_whose_spaces_differ_says_so() -> None:
    with pytest.raises(
        search_replace.NoMatchError, match="; with other spaces it stands at line 2"
    ):
        search_replace.replace(SOURCE, "\ttotal = a + b", "x")


def test_a_missing_match_unlike_everything_gets_no_hint() -> None:
    with pytest.raises(search_replace.NoMatchError, match=r"^old_string not found$"):
        search_replace.replace(SOURCE, "import os", "x")


async def test_the_answer_shows_the_changed_lines_and_those_around() -> None:
    workspace = MemoryWorkspace({"a.txt": b"1\n2\n3\n4\n5\n6\n7\n8\n9\n"}, no_shell)
    outcome = await change(workspace, path="a.txt", old_string="5\n6", new_string="five\nsix\n+")
    assert outcome.content == (
        "Changed a.txt:\n@@ line 5 @@\n 2\n 3\n 4\n-5\n-6\n+five\n+six\n++\n 7\n 8\n 9"
    )


@pytest.mark.parametrize(
    ("old", "new", "hunk"),
    [
        ("b\n", "", "@@ line 2 @@\n a\n-b\n+\n c"),
        ("c", "C", "@@ line 3 @@\n a\n b\n-c\n+C"),
        ("a\nb\nc", "", "@@ line 1 @@\n-a\n-b\n-c\n+"),
        ("a", "a\na", "@@ line 1 @@\n-a\n+a\n+a\n b\n c"),
    ],
)
async def test_hunks_at_the_edges_of_a_file(old: str, new: str, hunk: str) -> None:
    workspace = MemoryWorkspace({"f": b"a\nb\nc"}, no_shell)
    outcome = await change(workspace, path="f", old_string=old, new_string=new)
    assert outcome.content == f"Changed f:\n{hunk}"
    assert workspace.files["f"].decode() == "a\nb\nc".replace(old, new)


async def test_replacing_everywhere_says_in_how_many_places() -> None:
    workspace = MemoryWorkspace({"f": b"x x x"}, no_shell)
    outcome = await change(workspace, path="f", old_string="x", new_string="y", replace_all="true")
    assert outcome.content.startswith("Changed f in 3 places:\n")
    assert workspace.files["f"] == b"y y y"


async def test_a_refused_edit_changes_nothing() -> None:
    workspace = MemoryWorkspace({"f": b"x x"}, no_shell)
    for old, new in (("x", "y"), ("z", "y"), ("x x", "x x"), ("", "y")):
        outcome = await change(workspace, path="f", old_string=old, new_string=new)
        assert outcome.kind in {ErrorKind.TOOL, ErrorKind.INVALID}
    assert workspace.files == {"f": b"x x"}
