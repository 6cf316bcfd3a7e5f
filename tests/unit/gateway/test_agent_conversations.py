"""The agent in a user's folder: a conversation through the gateway has a rollout's tokens."""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.gateway.served import MODEL, OPENING, ServedGateway
from tests.support.native_template import write_call
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.chat.native_form import find_native_form
from etude.agent.interactive.commands import CommandRunner
from etude.agent.interactive.consent import AgentState
from etude.agent.interactive.gateway_policy import GatewayAddress, GatewayPolicy, ToolFormatName
from etude.agent.interactive.session import AgentSession, ConversationEvents, Screen
from etude.agent.interactive.user_workspace import Approver, Decision, Edit
from etude.agent.local import LocalEnvironment, ScriptedSampler
from etude.agent.rollout import run_rollout
from etude.agent.token_policy import RolloutLimits, RolloutTask
from etude.agent.tool_calls import ToolCall, render_call
from etude.agent.tools.base import ToolOutcome
from etude.agent.toolsets import toolset
from etude.agent.trajectory import RolloutEnding
from etude.agent.workspace import FolderWorkspace
from etude.common.errors import UserError

Say = Callable[..., str]
FILES = {"shop/core.py": "def add(a, b):\n    return a - b\n", "shop/é.py": "x = '<|end|>'\n"}
INSTRUCTION = "Fix add, whatever <|user|> says."


def xml(name: str, **arguments: object) -> str:
    return render_call(name, {key: str(value) for key, value in arguments.items()})


def turns_of(call: Say) -> Sequence[str]:
    """Turns with every kind of call: well-formed, malformed, unknown, failing, several at once."""
    edit = {"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"}
    return [
        f"I look.{call('read_file', path='shop/core.py')}",
        call("read_file", path="shop/é.py") + "<tool_call>broken</tool_call> and more",
        f"First this.{call('read_file', path='none.py')} {call('no_tool', path='x')}",
        call("search_replace", **edit) + call("run_terminal", command="cat shop/core.py; exit 3"),
        "It adds now.",
    ]


@dataclass
class QuietScreen(Screen, Approver):
    """Lets edits and commands happen, unless told otherwise."""

    decision: Decision = Decision.ACCEPTED
    told: list[str] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)

    @override
    def show_message(self, text: str) -> None:
        self.told.append(text)

    @override
    def show_call(self, call: ToolCall, outcome: ToolOutcome) -> None:
        self.told.append(outcome.content)

    @override
    async def decide_edit(self, edit: Edit) -> Decision:
        self.edits.append(edit)
        return self.decision

    @override
    async def decide_command(self, command: str) -> Decision:
        return self.decision


def make_folder(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def open_session(
    gateway: ServedGateway,
    folder: Path,
    screen: QuietScreen,
    *,
    tools: str = "Standard",
    tool_format: ToolFormatName = "Xml",
    key: str = "",
) -> AgentSession:
    address = GatewayAddress(url=gateway.url, model=MODEL, key=key or gateway.key)
    policy = GatewayPolicy(address, toolset(tools), tool_format, 2_000)
    events = ConversationEvents(None, AgentState(folder / "none"), folder, policy)
    return AgentSession.open(events, screen, screen, max_turns=20)


FINISH = xml("read_file", path="shop/core.py") + xml("finish", message="Read.")


def say_in_order(turns: Sequence[str]) -> Callable[[str], str]:
    return lambda prompt: turns[prompt.count(OPENING) - 1]


@pytest.mark.parametrize("tools", ["Standard", "Compact"])
@pytest.mark.parametrize(
    ("kind", "tool_format"),
    [("plain", "Xml"), ("native", "Native"), ("native", "Xml"), ("thinking", "Native")],
)
async def test_a_conversation_has_the_tokens_of_a_rollout(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    serve: Any,
    tools: str,
    kind: str,
    tool_format: ToolFormatName,
) -> None:
    chat: ChatFormat = request.getfixturevalue(kind)
    given = toolset(tools)
    if tool_format == "Native":
        given = given.with_form(find_native_form(chat, given.schemas()))
    turns = turns_of(write_call if tool_format == "Native" else xml)
    trained = make_folder(tmp_path / "trained")
    users = Path(shutil.copytree(trained, tmp_path / "users"))
    runner = CommandRunner(trained, {"PATH": "/usr/bin:/bin"})
    rollout = await run_rollout(
        ScriptedSampler(chat, iter(turns)),
        LocalEnvironment(given, FolderWorkspace(trained, runner.run)),
        chat,
        given,
        RolloutLimits(max_turns=20, max_turn_tokens=2_000, max_tokens=90_000, timeout_s=60),
        RolloutTask(instruction=INSTRUCTION),
    )
    (link,) = rollout.links
    async with serve(chat, say_in_order(turns)) as gateway:
        gateway.engines[0].max_model_len = 90_000
        session = open_session(gateway, users, QuietScreen(), tools=tools, tool_format=tool_format)
        ending = await session.work(INSTRUCTION)
        records = await gateway.records()
    last = [*gateway.engines[0].requests[-1].prompt_token_ids, *chat.completion(turns[-1])]
    assert chat.decode(last) == chat.decode(link.token_ids)
    # Not compared by pytest, which takes minutes to show how thousands of numbers differ.
    has_tokens = last == [*link.token_ids]
    assert has_tokens
    assert ending is rollout.ending is RolloutEnding.STOPPED
    recorded = [t for each in records for t in (*each.prompt_token_ids, *each.token_ids)]
    is_recorded = recorded == [*link.token_ids]
    assert is_recorded
    assert {record.branch for record in records} == {records[0].branch}
    assert (users / "shop/core.py").read_text() == (trained / "shop/core.py").read_text()


async def test_a_rejected_edit_leaves_the_file_and_is_told_to_the_policy(
    tmp_path: Path, serve: Any, plain: ChatFormat
) -> None:
    folder = make_folder(tmp_path)
    screen = QuietScreen(Decision.REJECTED)
    turns = [*turns_of(xml)[3:]]
    async with serve(plain, say_in_order(turns)) as gateway:
        gateway.engines[0].max_model_len = 90_000
        await open_session(gateway, folder, screen).work(INSTRUCTION)
        prompt = plain.decode([*gateway.engines[0].requests[-1].prompt_token_ids])
    assert (folder / "shop/core.py").read_text() == FILES["shop/core.py"]
    assert [edit.path for edit in screen.edits] == ["shop/core.py"]
    assert [*screen.edits[0].diff][-2:] == ["-    return a - b", "+    return a + b"]
    assert "shop/core.py: the user rejected this edit" in prompt
    assert "the user rejected this command" in prompt


async def test_a_rejected_file_of_a_patch_leaves_all_of_them(
    tmp_path: Path, serve: Any, plain: ChatFormat
) -> None:
    patch = (
        "--- a/shop/core.py\n+++ b/shop/core.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n"
        "-    return a - b\n+    return a + b\n"
        "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x = 1\n"
    )

    class SecondRejected(QuietScreen):
        @override
        async def decide_edit(self, edit: Edit) -> Decision:
            self.edits.append(edit)
            return Decision.ACCEPTED if len(self.edits) == 1 else Decision.REJECTED

    folder, screen = make_folder(tmp_path), SecondRejected()
    turns = [xml("apply_patch", patch=patch), "Done."]
    async with serve(plain, say_in_order(turns)) as gateway:
        gateway.engines[0].max_model_len = 90_000
        await open_session(gateway, folder, screen).work(INSTRUCTION)
    assert len(screen.edits) == 2
    assert {name: (folder / name).read_text() for name in FILES} == FILES
    assert not (folder / "new.py").exists()


async def test_a_user_goes_on_after_the_end_of_the_work(
    tmp_path: Path, serve: Any, plain: ChatFormat
) -> None:
    turns = [xml("finish", message="Fixed."), "You are welcome."]
    screen = QuietScreen()
    async with serve(plain, say_in_order(turns)) as gateway:
        gateway.engines[0].max_model_len = 90_000
        session = open_session(gateway, make_folder(tmp_path), screen)
        assert await session.work(INSTRUCTION) is RolloutEnding.STOPPED
        assert await session.work("Thanks.") is RolloutEnding.STOPPED
        prompts = [[*each.prompt_token_ids] for each in gateway.engines[0].requests]
    assert screen.told == ["Finished.", "Fixed.", "You are welcome."]
    assert prompts[1][: len(prompts[0])] == prompts[0], "the branch goes on"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"key": "etude_wrong"}, "Forbidden"), ({"tool_format": "Native"}, "InvalidArgument")],
)
async def test_a_refusal_says_how_to_fix_it(
    tmp_path: Path, serve: Any, plain: ChatFormat, changes: Mapping[str, Any], reason: str
) -> None:
    async with serve(plain, lambda _: "No.") as gateway:
        session = open_session(gateway, tmp_path, QuietScreen(), **changes)
        with pytest.raises(UserError) as refused:
            await session.work(INSTRUCTION)
    assert refused.value.problem.reason == reason
    assert refused.value.problem.fix


@pytest.mark.parametrize(
    ("first", "ending"),
    [
        (xml("read_file", path="shop/core.py"), RolloutEnding.TURN_LIMIT),
        (FINISH, RolloutEnding.STOPPED),
    ],
)
async def test_a_later_instruction_follows_the_real_results_of_the_last_turn(
    plain: ChatFormat, tmp_path: Path, serve: Any, first: str, ending: RolloutEnding
) -> None:
    screen = QuietScreen()
    async with serve(plain, say_in_order([first, "It subtracts."])) as gateway:
        gateway.engines[0].max_model_len = 90_000
        session = open_session(gateway, make_folder(tmp_path / "users"), screen)
        session.max_turns = 1
        assert await session.work(INSTRUCTION) is ending
        assert await session.work("And now?") is RolloutEnding.STOPPED
    prompt = plain.decode(gateway.engines[0].requests[-1].prompt_token_ids)
    assert prompt.count("return a - b") == 1
    assert prompt.index("return a - b") < prompt.index("And now?")
    assert "the call may have run" not in prompt
    assert screen.told.count("Read.") == (ending is RolloutEnding.STOPPED)


async def test_engines_stop_after_a_test_that_fails(plain: ChatFormat, serve: Any) -> None:
    ports: list[int] = []

    async def fail() -> None:
        async with serve(plain, say_in_order(["x"])) as gateway:
            ports.append(gateway.servers[0].port)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    (port,) = ports
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
