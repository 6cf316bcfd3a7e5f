"""Protected paths of grading, as they were at first."""

import pytest

from etude.common.errors import InvalidFieldError
from etude.common.harbor.grading_repairs import CACHE_PATHS, RUNNER_PATHS, TEST_PATHS
from etude.envserver.host.grading.protected_paths import restore_protected
from etude.envserver.storage.trees import File

FIRST = {
    "shop.py": File(b"x = 1\n"),
    "tests/test_shop.py": File(b"def test(): ...\n"),
    "pyproject.toml": File(b'[project]\nname = "shop"\n[tool.pytest.ini_options]\n'),
}
USUAL = (*RUNNER_PATHS, *TEST_PATHS, *CACHE_PATHS)


def graded(changed: dict[str, bytes], allowed: tuple[str, ...] = ()) -> dict[str, bytes]:
    tree = {path: File(content) for path, content in changed.items()}
    found = restore_protected(FIRST, tree, USUAL, allowed)
    return {path: file.content for path, file in found.items()}


def first(**changes: bytes) -> dict[str, bytes]:
    return {path: file.content for path, file in FIRST.items()} | changes


def test_changed_added_and_deleted_tests_are_as_they_were() -> None:
    changed = first(**{"shop.py": b"x = 2\n", "tests/conftest.py": b"", "test_new.py": b""})
    del changed["tests/test_shop.py"]
    assert graded(changed) == first(**{"shop.py": b"x = 2\n"})


def test_settings_keep_a_change_outside_of_the_runners_part() -> None:
    other = b'[project]\nname = "shop2"\n[tool.pytest.ini_options]\n'
    assert graded(first(**{"pyproject.toml": other}))["pyproject.toml"] == other
    hooked = b'[tool.pytest.ini_options]\naddopts = "-p mine"\n'
    assert graded(first(**{"pyproject.toml": hooked})) == first()
    assert graded(first(**{"pyproject.toml": b"no toml ["})) == first()
    assert graded(first(**{"setup.cfg": b"[tool:pytest]\naddopts = -x\n"})) == first()
    shown = b"[metadata]\nname = shop\n"
    assert graded(first(**{"setup.cfg": shown}))["setup.cfg"] == shown


def test_compiled_code_is_left_out() -> None:
    assert graded(first(**{"__pycache__/shop.cpython-311.pyc": b"", "shop.pyc": b""})) == first()


def test_a_task_allows_what_it_asks_for() -> None:
    changed = first(**{"tests/test_new.py": b""})
    assert graded(changed, allowed=("tests/test_new.py",)) == changed


def test_a_file_where_a_restored_path_needs_a_folder_is_left_out() -> None:
    changed = first(tests=b"a file now")
    del changed["tests/test_shop.py"]
    assert graded(changed) == first()


def test_a_folder_where_a_restored_path_is_a_file_is_left_out() -> None:
    changed = first(**{"pyproject.toml/inside": b""})
    del changed["pyproject.toml"]
    assert graded(changed) == first()


def test_an_invalid_pattern_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidFieldError, match="allowed_paths"):
        restore_protected(FIRST, FIRST, USUAL, ["[z-a]"])
