"""What the small test runner prints, and what it leaves behind."""

import sys
from types import ModuleType

import pytest

from etude.agent import minitest

TESTS = (
    b"from shop.core import add\n\ndef test_one():\n    assert add(1, 1) == 2\n"
    b"\ndef test_two():\n    assert add(1, 2) == 3\n"
)


def repository(core: bytes) -> dict[str, bytes]:
    return {"shop/core.py": core, "tests/test_repo.py": TESTS}


def test_passing_tests_are_counted() -> None:
    verdict = minitest.run(repository(b"def add(a, b):\n    return a + b\n"))

    assert verdict == ("2 passed\n", minitest.PASSED)


def test_each_failed_test_is_named_before_the_count() -> None:
    verdict = minitest.run(repository(b"def add(a, b):\n    return 0\n"))

    assert verdict == ("FAILED test_one\nFAILED test_two\n2 failed\n", minitest.FAILED)


def test_a_file_that_cannot_be_imported_is_named() -> None:
    verdict = minitest.run(repository(b"return\n"))

    assert verdict == ("ERROR tests/test_repo.py\n1 error\n", minitest.INTERRUPTED)


def test_leaving_the_process_at_import_is_an_error() -> None:
    verdict = minitest.run(repository(b"raise SystemExit(0)\n"))

    assert verdict.exit_code == minitest.INTERRUPTED


def test_no_tests_is_no_success() -> None:
    assert minitest.run({"a.py": b""}) == ("no tests ran\n", minitest.NO_TESTS)


def test_one_repository_does_not_see_the_modules_of_the_last() -> None:
    minitest.run(repository(b"def add(a, b):\n    return a + b\n"))

    verdict = minitest.run(repository(b"def add(a, b):\n    return 2\n"))

    assert verdict.output == "FAILED test_two\n1 failed\n"


def test_the_process_keeps_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", ours)
    before = dict(sys.modules)

    verdict = minitest.run(repository(b"def add(a, b):\n    return a + b\n"))

    assert verdict.exit_code == minitest.PASSED
    assert sys.modules["shop"] is ours
    assert {name for name in sys.modules if name not in before} <= sys.stdlib_module_names
    assert not any("_Importer" in type(finder).__name__ for finder in sys.meta_path)


def test_a_repository_cannot_replace_the_standard_library_of_the_process() -> None:
    files = {
        "json.py": b"raise RuntimeError\n",
        "test_a.py": b"import json\ndef test_a():\n    assert json.loads('3') == 3\n",
    }

    assert minitest.run(files).exit_code == minitest.PASSED


def test_the_callers_timer_passes_through_a_test() -> None:
    class TimeUpError(BaseException):
        pass

    files = {"test_a.py": b"import builtins\ndef test_a():\n    raise builtins.TimeUp\n"}
    vars(sys.modules["builtins"])["TimeUp"] = TimeUpError
    try:
        with pytest.raises(TimeUpError):
            minitest.run(files)
    finally:
        del vars(sys.modules["builtins"])["TimeUp"]


def test_what_a_test_prints_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    minitest.run({"test_a.py": b"print('a')\ndef test_a():\n    print('b')\n    assert 0\n"})

    assert capsys.readouterr().out == ""
