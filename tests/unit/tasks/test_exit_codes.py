"""`etude tasks show` and `verify` exit as the command line promises."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from etude.envserver.tasks import show, verify

Main = Callable[[Sequence[str]], int]


@pytest.mark.parametrize("main", [show.main, verify.main])
def test_a_path_that_is_no_folder_is_not_found(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nope")]) == 3
    assert "fix: check the path" in capsys.readouterr().err


@pytest.mark.parametrize("main", [show.main, verify.main])
def test_a_folder_without_a_task_is_invalid(main: Main, tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 4


def test_a_negative_limit_proves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main([str(tmp_path), "--limit", "-4"]) == 2
    assert "--limit  is -4" in capsys.readouterr().err
