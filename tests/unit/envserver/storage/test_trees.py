"""Workspaces as values, and what a hostile diff cannot do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.errors import InvalidFieldError
from etude.envserver.storage import trees
from etude.envserver.storage.trees import File
from etude.v1 import environments_pb2

segments = st.text("abc", min_size=1, max_size=2)
files = st.builds(File, st.binary(max_size=3), st.booleans())
flat_trees = st.dictionaries(segments, files, max_size=5)


def diff(*written: str, deleted: tuple[str, ...] = ()) -> environments_pb2.WorkspaceDiff:
    return environments_pb2.WorkspaceDiff(
        written=[environments_pb2.WorkspaceFile(path=path, content=b"new") for path in written],
        deleted=deleted,
    )


@given(flat_trees, flat_trees)
def test_a_difference_turns_one_tree_into_the_other(
    before: dict[str, File], after: dict[str, File]
) -> None:
    assert trees.apply_diff(before, trees.tree_difference(before, after), ()) == after


@given(flat_trees, flat_trees)
def test_trees_have_the_same_identity_when_they_are_the_same(
    one: dict[str, File], other: dict[str, File]
) -> None:
    assert (trees.tree_identity(one) == trees.tree_identity(other)) == (one == other)
    assert trees.tree_identity(one) == trees.tree_identity(dict(reversed(one.items())))


def test_only_artefacts_are_taken_from_a_diff() -> None:
    tree = {"shop/a.py": File(b"old"), "shop/b.py": File(b"old"), "tests/t.py": File(b"old")}
    change = diff("shop/a.py", "tests/t.py", "conftest.py", deleted=("shop/b.py", "tests/t.py"))

    result = trees.apply_diff(tree, change, ["shop/*.py"])

    assert result == {"shop/a.py": File(b"new"), "tests/t.py": File(b"old")}


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\0b", "a/../b", "/workspace/a"],
)
def test_a_path_that_leaves_its_folder_is_refused(path: str) -> None:
    with pytest.raises(InvalidFieldError):
        trees.apply_diff({}, diff(path), ())


def test_a_path_below_a_file_is_refused() -> None:
    with pytest.raises(InvalidFieldError):
        trees.apply_diff({"a": File(b"")}, diff("a/b/c"), ())


def test_a_broken_pattern_is_named() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        trees.apply_diff({}, diff("a"), ["[z-a]"])

    assert caught.value.field == "artefacts"
