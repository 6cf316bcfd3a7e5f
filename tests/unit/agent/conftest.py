"""A small tokenizer with the layout's tokens, and workspaces to work in."""

from collections.abc import Callable
from pathlib import Path

import pytest

from etude.agent.chat import ChatFormat
from etude.agent.workspace import ExecResult, FolderWorkspace, MemoryWorkspace, Workspace

MODEL = Path(__file__).parent / "model"


@pytest.fixture(scope="session")
def chat() -> ChatFormat:
    return ChatFormat.load(MODEL)


async def echo(command: str, timeout_s: float) -> ExecResult:
    """A shell that says what it was asked to do."""
    return ExecResult(output=f"{command} within {timeout_s:g} s\n".encode(), exit_code=0)


@pytest.fixture(params=["memory", "folder"])
def make_workspace(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[dict[str, bytes]], Workspace]:
    """Builds a workspace of either kind from its files."""

    def make(files: dict[str, bytes]) -> Workspace:
        if request.param == "memory":
            return MemoryWorkspace(dict(files), echo)
        for path, data in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(data)
        return FolderWorkspace(tmp_path, echo)

    return make
