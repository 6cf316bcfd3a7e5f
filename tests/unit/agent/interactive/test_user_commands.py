"""Commands and edits of the policy in a user's own folder."""

from pathlib import Path

import pytest
from typing_extensions import override

from etude.agent.interactive.commands import CommandRunner
from etude.agent.interactive.user_workspace import (
    Approver,
    Decision,
    DecisionListener,
    Edit,
    RejectedEditError,
    open_user_workspace,
)


async def test_a_command_cannot_print_the_api_key(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "ETUDE_API_KEY": "etude_7", "EDITOR": "vi"}
    result = await CommandRunner(tmp_path, environment).run("env", 10.0)
    assert b"EDITOR=vi" in result.output
    assert b"etude_7" not in result.output


class User(Approver, DecisionListener):
    """A user who wants no file no.py."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @override
    def note_edit(self, edit: Edit, decision: Decision) -> None: ...

    @override
    def note_command(self, decision: Decision) -> None: ...

    @override
    async def decide_edit(self, edit: Edit) -> Decision:
        self.asked.append(edit.path)
        return Decision.REJECTED if edit.path == "no.py" else Decision.ACCEPTED

    @override
    async def decide_command(self, command: str) -> Decision:
        return Decision.REJECTED


@pytest.mark.parametrize("user_writes", [False, True])
async def test_what_a_user_wrote_after_an_edit_is_not_undone_without_a_question(
    tmp_path: Path, *, user_writes: bool
) -> None:
    (tmp_path / "a.py").write_text("old")
    user = User()
    workspace = open_user_workspace(tmp_path, user, user)
    await workspace.write("a.py", b"new")
    if user_writes:
        (tmp_path / "a.py").write_text("the user's own")
    with pytest.raises(RejectedEditError):
        await workspace.write("no.py", b"x")
    await workspace.write("a.py", b"old")
    assert user.asked == ["a.py", "no.py", "a.py"][: 3 if user_writes else 2]
