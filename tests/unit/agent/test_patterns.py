"""Globs and searches against independent oracles: pathlib and the standard library's re."""

import re
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent import patterns
from etude.agent.patterns import FileMatches, GrepLine, GrepQuery, PatternError

PATHS = ["a.py", "b.txt", "src/a.py", "src/deep/a.py", "src/deep/x[1].py", "src/b/ab.py", "é/a.py"]
glob_segments = (
    st.lists(
        st.sampled_from(["a", "b", "*", "?", ".py", ".txt", "[ab]", "[!a]", "é", "src", "deep"]),
        min_size=1,
        max_size=3,
    )
    .map("".join)
    # Two stars within a name are an error to pathlib, and one star to everybody else.
    .filter(lambda segment: "**" not in segment)
)
globs = st.lists(glob_segments | st.just("**"), min_size=1, max_size=3).map("/".join)


def grep(text: str, **query: object) -> FileMatches | None:
    asked = GrepQuery(**query)  # type: ignore[arg-type] # the tests name the fields
    return patterns.file_matches(patterns.grep_matcher(asked), asked, "f", text.encode())


@given(globs.filter(lambda pattern: not pattern.endswith("**")))
def test_a_glob_matches_what_pathlib_matches(pattern: str) -> None:
    # A trailing ** means folders to pathlib and files to everybody else, so it is left out here.
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for path in PATHS:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
        theirs = {str(p.relative_to(root)) for p in root.glob(pattern) if p.is_file()}
    assert set(patterns.match_glob(pattern, PATHS)) == theirs


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("src/**", ["src/a.py", "src/deep/a.py", "src/deep/x[1].py", "src/b/ab.py"]),
        ("**", PATHS),
        ("*.{py,txt}", ["a.py", "b.txt"]),
        ("**/x[[]1].py", ["src/deep/x[1].py"]),
        ("./a.py", ["a.py"]),
        ("a.PY", []),
        ("", []),
    ],
)
def test_a_glob_means_what_a_shell_user_expects(pattern: str, expected: list[str]) -> None:
    assert patterns.match_glob(pattern, PATHS) == expected


def test_hidden_paths_are_for_globs_that_name_them() -> None:
    paths = [".git/config", "a/.env", "a/b"]
    assert patterns.match_glob("**", paths) == ["a/b"]
    assert patterns.match_glob("**/.env", paths) == ["a/.env"]
    assert patterns.match_glob(".git/**", paths) == [".git/config"]


@given(
    text=st.text(alphabet="ab\n\r é", max_size=80),
    pattern=st.sampled_from(
        ["a", "a+b", "^b", "a$", "[^a]b", "é", "(a|b) ", "$", "a.b", r"\bb", "a\nb"]
    ),
    ignore_case=st.booleans(),
)
def test_matching_lines_are_those_of_a_line_by_line_search(
    *, text: str, pattern: str, ignore_case: bool
) -> None:
    flags = re.MULTILINE | (re.IGNORECASE if ignore_case else 0)
    lines = text.removesuffix("\n").split("\n") if text else []
    expected = [n for n, line in enumerate(lines, 1) if re.search(pattern, line, flags | re.ASCII)]
    found = grep(text, pattern=pattern, ignore_case=ignore_case)
    assert [line.number for line in found.lines if line.is_match] if found else expected == []


def test_context_lines_are_shown_once() -> None:
    found = grep("1\nx\n3\nx\n5\n6", pattern="x", before=1, after=1)
    assert found == FileMatches(
        "f",
        (
            GrepLine(1, "1", is_match=False),
            GrepLine(2, "x", is_match=True),
            GrepLine(3, "3", is_match=False),
            GrepLine(4, "x", is_match=True),
            GrepLine(5, "5", is_match=False),
        ),
        2,
    )


def test_a_multiline_match_marks_every_line_it_covers() -> None:
    found = grep("a\nbegin\nmiddle\nend\nz", pattern="begin.*end", multiline=True)
    assert found is not None
    assert [line.number for line in found.lines] == [2, 3, 4]


def test_without_multiline_a_match_does_not_cross_lines() -> None:
    assert grep("a\nb", pattern=r"a\sb") is None


def test_a_literal_pattern_is_no_expression() -> None:
    found = grep("a.b\naxb\nadd(", pattern="a.b", is_literal=True)
    assert found is not None
    assert found.num_matches == 1
    assert grep("add(", pattern="add(", is_literal=True) is not None


def test_binary_files_hold_no_text() -> None:
    assert grep("x\0", pattern="x") is None


def test_a_limit_keeps_lines_of_the_first_matches_and_every_count() -> None:
    files = [grep("x\nx\n", pattern="x"), grep("x\n", pattern="x")]
    kept = patterns.limit_matches([file for file in files if file], 1)
    assert [len(file.lines) for file in kept] == [1, 0]
    assert [file.num_matches for file in kept] == [2, 1]


def test_a_pattern_bomb_costs_time_in_proportion_to_the_text() -> None:
    started = time.process_time()
    assert grep("a" * 100_000, pattern="(a+)+$x|(a|aa)*b") is None
    assert not patterns.match_glob("*a" * 20 + "b", ["a" * 200])
    assert grep("a\n" * 20_000, pattern="a(?:[^x]*x)?", multiline=True) is not None
    assert grep("a\n" * 50_000, pattern="a(?:[^x]*x)?") is not None
    # Backtracking would take longer than the age of the universe; this takes milliseconds.
    assert time.process_time() - started < 20


@pytest.mark.parametrize("pattern", ["(", "x{1001}", "[z-a]", "(?<=a)b"])
def test_what_is_no_expression_is_refused_with_the_reason(pattern: str) -> None:
    with pytest.raises(PatternError) as caught:
        grep("x", pattern=pattern)
    assert str(caught.value).startswith(repr(pattern))


@pytest.mark.parametrize(
    ("glob", "is_searched"),
    [("*.py", True), ("src/*", True), ("*.txt", False), ("b/*", False), ("**/a.*", True)],
)
def test_a_search_is_narrowed_by_globs(*, glob: str, is_searched: bool) -> None:
    query = GrepQuery(pattern="x", globs=(glob,))
    assert patterns.is_searched(query, "", "src/a.py", 1) is is_searched
