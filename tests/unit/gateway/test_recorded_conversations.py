"""Conversations of users, recorded by a gateway, replay on a copy of the folder they began with."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.native_template import write_call
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.chat.native_form import find_native_form
from etude.agent.interactive.commands import CommandRunner
from etude.agent.interactive.consent import AgentState
from etude.agent.interactive.gateway_policy import GatewayAddress, GatewayPolicy, ToolFormatName
from etude.agent.interactive.session import AgentSession, ConversationEvents, Screen, did_not_run
from etude.agent.interactive.user_workspace import Approver, Decision, Edit
from etude.agent.local import LocalEnvironment
from etude.agent.recorded_conversation import (
    RecordedTurn,
    ReplayReport,
    join_turns,
    replay_conversation,
)
from etude.agent.tool_calls import ToolCall, render_call
from etude.agent.tools.base import ToolOutcome
from etude.agent.toolsets import Toolset, toolset
from etude.agent.workspace import FolderWorkspace
from etude.common.errors import UserError

FILES = {
    "shop/core.py": "def add(a, b):\n    return a - b\n",
    # Tags as text: the results of neighbouring calls must not be told apart by them.
    "shop/é.txt": "one <|end|>\n<|tool|>\ntwo  \n",
    "notes.txt": "first\n",
}
EDIT = {"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"}
Say = Callable[..., str]


def xml(name: str, **arguments: object) -> str:
    return render_call(name, {key: str(value) for key, value in arguments.items()})


def turns_of(call: Say) -> list[str]:
    return [
        f"I look.{call('read_file', path='shop/core.py')}{call('read_file', path='shop/é.txt')}",
        call("read_file", path="notes.txt") + "<tool_call>broken</tool_call> and more",
        call("search_replace", **EDIT) + call("read_file", path="none.py"),
        call("run_terminal", command="cat shop/core.py notes.txt; exit 3"),
        "It adds now.",
        # After the user's next message.
        call("read_file", path="notes.txt") + call("grep", pattern="return"),
        "You are welcome.",
    ]


class Quiet(Screen, Approver):
    """A user who agrees to everything but some edits."""

    def __init__(self, *, rejects: bool) -> None:
        self.decision = Decision.REJECTED if rejects else Decision.ACCEPTED

    @override
    def show_message(self, text: str) -> None: ...

    @override
    def show_call(self, call: ToolCall, outcome: ToolOutcome) -> None: ...

    @override
    async def decide_edit(self, edit: Edit) -> Decision:
        return self.decision

    @override
    async def decide_command(self, command: str) -> Decision:
        return Decision.ACCEPTED


def make_folder(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def environment(folder: Path, tools: Toolset) -> LocalEnvironment:
    runner = CommandRunner(folder, {"PATH": "/usr/bin:/bin"})
    return LocalEnvironment(tools, FolderWorkspace(folder, runner.run))


async def record(  # noqa: PLR0913 - one for each part that tests vary
    serve: Any,
    chat: ChatFormat,
    folder: Path,
    turns: Sequence[str],
    *,
    instructions: Sequence[str] = ("Fix add, whatever <|user|> says.",),
    tools: str = "Standard",
    tool_format: ToolFormatName = "Xml",
    rejects: bool = False,
) -> list[RecordedTurn]:
    """Work on instructions in a folder, and read what the gateway recorded."""
    said = iter(turns)
    async with serve(chat, lambda _: next(said)) as gateway:
        gateway.engines[0].max_model_len = 90_000
        address = GatewayAddress(url=gateway.url, model="tiny", key=gateway.key)
        policy = GatewayPolicy(address, toolset(tools), tool_format, 2_000)
        events = ConversationEvents(None, AgentState(folder / "none"), folder, policy)
        screen = Quiet(rejects=rejects)
        session = AgentSession.open(events, screen, screen, max_turns=20)
        for text in instructions:
            await session.work(text)
        records = await gateway.records()
    return [
        RecordedTurn(each.num_prefix_tokens, [*each.prompt_token_ids], [*each.token_ids])
        for each in records
    ]


async def replay(
    chat: ChatFormat, tools: Toolset, folder: Path, turns: Sequence[RecordedTurn]
) -> ReplayReport:
    return await replay_conversation(
        chat, tools, environment(folder, tools), turns, is_left_out=did_not_run
    )


@pytest.mark.parametrize(
    ("kind", "tool_format"), [("plain", "Xml"), ("native", "Native"), ("thinking", "Native")]
)
async def test_a_conversation_replays_and_a_changed_file_is_one_difference(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    serve: Any,
    kind: str,
    tool_format: ToolFormatName,
) -> None:
    chat: ChatFormat = request.getfixturevalue(kind)
    tools = toolset("Standard")
    if tool_format == "Native":
        tools = tools.with_form(find_native_form(chat, tools.schemas()))
    users = make_folder(tmp_path / "users")
    copies = [shutil.copytree(users, tmp_path / name) for name in ("same", "changed")]
    recorded = await record(
        serve,
        chat,
        users,
        turns_of(write_call if tool_format == "Native" else xml),
        instructions=["Fix add, whatever <|user|> says.", "Thanks, <|end|> again."],
        tool_format=tool_format,
    )
    report = await replay(chat, tools, copies[0], recorded)
    assert report.differences == []
    assert (report.num_turns, report.num_calls) == (7, 8), "one of nine calls does not parse"
    assert (copies[0] / "shop/core.py").read_text().endswith("a + b\n")
    (copies[1] / "shop/é.txt").write_text("one <|end|>\n<|tool|>\n2  \n")
    report = await replay(chat, tools, copies[1], recorded)
    (found,) = report.differences
    assert (found.turn, found.call, found.tool) == (0, 1, "read_file")
    assert "shop/é.txt" in found.arguments_json
    changed = [line for line in found.format_diff()[2:] if line[0] in "+-"]
    assert len(changed) == 2
    assert changed[0].endswith("two  ")
    assert changed[1].endswith("2  ")


async def test_rejected_edits_are_not_made_again(
    tmp_path: Path, serve: Any, plain: ChatFormat
) -> None:
    users = make_folder(tmp_path / "users")
    copy = shutil.copytree(users, tmp_path / "copy")
    turns = [xml("search_replace", **EDIT), xml("read_file", path="shop/core.py"), "I stop."]
    recorded = await record(serve, plain, users, turns, rejects=True)
    report = await replay(plain, toolset("Standard"), copy, recorded)
    assert report.differences == []
    assert (report.num_calls, report.num_left_out) == (1, 1)
    assert (copy / "shop/core.py").read_text() == FILES["shop/core.py"]


async def test_calls_beside_the_end_of_the_work_run_again(
    tmp_path: Path, serve: Any, plain: ChatFormat
) -> None:
    users = make_folder(tmp_path / "users")
    copy = shutil.copytree(users, tmp_path / "copy")
    turns = [
        xml("search_replace", **EDIT) + xml("finish", message="Fixed."),
        xml("read_file", path="shop/core.py"),
        "It is.",
    ]
    recorded = await record(serve, plain, users, turns, instructions=["Fix add.", "Is it?"])
    report = await replay(plain, toolset("Standard"), copy, recorded)
    assert report.differences == []
    assert (copy / "shop/core.py").read_text().endswith("a + b\n")


async def test_another_toolset_is_refused(tmp_path: Path, serve: Any, plain: ChatFormat) -> None:
    recorded = await record(serve, plain, make_folder(tmp_path), ["Nothing to do."])
    with pytest.raises(UserError, match="--toolset"):
        await replay(plain, toolset("Compact"), tmp_path, recorded)


def test_turns_of_several_branches_are_joined_where_one_repeats_the_other() -> None:
    first = RecordedTurn(0, [1, 2], [3])
    repeated = RecordedTurn(0, [1, 2, 3, 4], [5])
    assert join_turns([first, repeated]) == [first, RecordedTurn(3, [4], [5])]
    for other in (RecordedTurn(0, [1, 9, 3, 4], [5]), RecordedTurn(2, [9, 3], [5])):
        with pytest.raises(UserError, match="continues another text"):
            join_turns([first, other])
    with pytest.raises(UserError, match="no turn"):
        join_turns([])
