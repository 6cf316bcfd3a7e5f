"""The plugin as a user calls it, with a kubectl that says what a test wants."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.kube.stub_kubectl import StubKubectl

from etude.cli.kubectl import main


class Told(NamedTuple):
    """How a verb ended, and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubKubectl:
    """The kubectl on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return StubKubectl(tmp_path)


@pytest.fixture
def etude(stub: StubKubectl, capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """`kubectl etude …`."""
    assert stub.program.exists()

    def call(*words: str) -> Told:
        with pytest.raises(SystemExit) as ended:
            main.main(words)
        code = ended.value.code
        out, err = capsys.readouterr()
        return Told(int(code or 0), out, err)

    return call
