"""Quality of a change against the reference: alike changes score 1, needless ones show."""

from hypothesis import given
from hypothesis import strategies as st

from etude.common.evaluation.quality import compare_change, count_changed_lines

TEXTS = st.lists(st.sampled_from(["a = 1", "b = 2", "c = 3", "", "    d()"]), max_size=8).map(
    "\n".join
)
FILES = st.dictionaries(st.sampled_from(["x.py", "y.py", "z.py"]), TEXTS, max_size=3)


@given(before=FILES, after=FILES, reference=FILES)
def test_figures_are_shares_and_one_only_for_equal_changes(
    before: dict[str, str], after: dict[str, str], reference: dict[str, str]
) -> None:
    try:
        found = compare_change(before, after, reference)
    except ValueError:
        assert all(
            count_changed_lines(before.get(path, ""), reference.get(path, "")) == 0
            for path in before.keys() | reference.keys()
        )
        return
    assert 0 <= found.lines <= 1
    assert 0 <= found.files <= 1
    assert (found.lines > 0) <= (found.files > 0)
    assert compare_change(before, reference, reference).lines == 1
    if found.lines == 1:
        assert found.size_ratio == 1
    assert compare_change(before, before, reference).size_ratio == 0


def test_needless_lines_lower_precision_and_missing_ones_recall() -> None:
    before = {"a.py": "one\ntwo\n", "b.py": "three\n"}
    reference = before | {"a.py": "one\nTWO\n"}
    more = compare_change(before, reference | {"b.py": "three\nfour\nfive\n"}, reference)
    assert (more.files, more.lines, more.size_ratio) == (2 / 3, 2 / 3, 2.0)
    part = compare_change(before, before | {"a.py": "one\n"}, reference)
    assert (part.files, part.lines, part.size_ratio) == (1.0, 2 / 3, 0.5)


def test_a_deleted_and_a_new_file_count_by_their_lines() -> None:
    before = {"old.py": "x\ny\n"}
    found = compare_change(before, {"new.py": "x\ny\n"}, {"new.py": "x\ny\n"})
    assert (found.files, found.lines) == (1.0, 1.0)


def test_blanks_around_lines_and_moved_lines_are_no_change() -> None:
    assert count_changed_lines("a\nb\n\nc\n", "c\n  a\nb\n") == 0
    assert count_changed_lines("a\n", "a\na\n") == 1
