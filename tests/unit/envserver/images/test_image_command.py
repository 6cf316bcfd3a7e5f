"""Which agent goes into an image that is built from the command line."""

import os
from pathlib import Path

import pytest

from etude.common.errors import UserError
from etude.envserver.images.command import find_agent


def agent(folder: Path, name: str, *, built_s: int) -> Path:
    path = folder / ".cache/etude/guest" / name / "guestagent"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"agent")
    os.utime(path, (built_s, built_s))
    return path


def test_the_named_one_comes_before_the_environments_and_that_before_the_newest(
    tmp_path: Path,
) -> None:
    older, newer = agent(tmp_path, "b", built_s=1), agent(tmp_path, "a", built_s=2)
    named = tmp_path / "named"
    named.write_bytes(b"agent")
    assert find_agent(None, {}, tmp_path) == newer
    assert find_agent(None, {"ETUDE_GUEST": str(older)}, tmp_path) == older
    assert find_agent(named, {"ETUDE_GUEST": str(older)}, tmp_path) == named


def test_without_one_it_says_how_to_build_it(tmp_path: Path) -> None:
    for given in (None, tmp_path / "none"):
        with pytest.raises(UserError) as caught:
            find_agent(given, {}, tmp_path)
        assert "hack/guest.py" in caught.value.problem.fix
