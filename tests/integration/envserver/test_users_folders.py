"""The agent in a user's folder has the results of a training environment, byte for byte."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from typing_extensions import override

from etude.agent.interactive.commands import ENVIRONMENT
from etude.agent.interactive.user_workspace import (
    Approver,
    Decision,
    DecisionListener,
    Edit,
    open_user_workspace,
)
from etude.agent.local import LocalEnvironment
from etude.agent.replay import CallLog, DivergedError, check_replay
from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import ToolOutcome
from etude.agent.toolsets import toolset
from etude.agent.turns import RolloutEnvironment
from etude.agent.workspace import ExecResult
from etude.envserver.drivers.folder_driver import FolderCommand
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.envserver.host.leases.call_results import exec_result
from etude.envserver.isolation import sandbox_layout

FILES = {
    "shop/core.py": b"def add(a, b):\n    return a - b\n",
    "shop/data.bin": bytes(range(256)),
    "shop/café.txt": "größe\r\n".encode(),
    "docs/long.txt": b"".join(b"line %d\n" % number for number in range(20_000)),
}
PATCH = (
    "--- a/shop/core.py\n+++ b/shop/core.py\n@@ -1,2 +1,3 @@\n def add(a, b):\n"
    "     return a + b\n+\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x = 1\n"
)
FIX = '"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"'
TURNS = [
    [("list_dir", "{}"), ("glob", '{"pattern": "**/*.py"}'), ("grep", '{"pattern": "return"}')],
    [("read_file", '{"path": "shop/core.py"}'), ("read_file", '{"path": "shop/data.bin"}')],
    [("read_file", '{"path": "docs/long.txt"}'), ("read_file", '{"path": "../x"}')],
    [("search_replace", "{" + FIX + "}"), ("search_replace", "{" + FIX + "}")],
    [("apply_patch", '{"patch": ' + json.dumps(PATCH) + "}")],
    [("run_terminal", '{"command": "cat shop/core.py; echo out; echo err >&2; exit 3"}')],
    [("run_terminal", '{"command": "cat docs/long.txt docs/long.txt"}')],
    [("run_terminal", '{"command": "sleep 30", "timeout": 1}')],
    [("run_terminal", '{"command": "kill -9 $$"}'), ("run_terminal", '{"command": "true"}')],
    [("run_terminal", '{"command": "cat; echo $CI $LANG $PAGER $TERM $PYTHONHASHSEED"}')],
    [
        ("write_file", '{"path": "a/b/c.py", "content": "y = (\\n"}'),
        ("read_lints", '{"paths": ["a/b/c.py"]}'),
    ],
    [("delete_file", '{"path": "shop/data.bin"}'), ("list_dir", '{"path": "shop"}')],
    [("codebase_search", '{"query": "add two numbers"}'), ("no_tool", "{}"), ("grep", "[]")],
]


class Agreeing(Approver, DecisionListener):
    """A user who agrees to everything."""

    @override
    def note_edit(self, edit: Edit, decision: Decision) -> None:
        assert decision is Decision.ACCEPTED

    @override
    def note_command(self, decision: Decision) -> None:
        assert decision is Decision.ACCEPTED

    @override
    async def decide_edit(self, edit: Edit) -> Decision:
        return Decision.ACCEPTED

    @override
    async def decide_command(self, command: str) -> Decision:
        return Decision.ACCEPTED


def training_environment(driver: ProcessDriver, folder: Path) -> LocalEnvironment:
    """The workspace of a lease, with the tools that its host runs on it."""

    async def run(command: str, timeout_s: float) -> ExecResult:
        where = folder / "workspace"
        given = FolderCommand(command=command, workspace=where, timeout_s=timeout_s)
        return exec_result(await driver.run(given))

    sandbox = driver.sandbox(folder, run, template="python")
    return LocalEnvironment(toolset("Standard"), sandbox.workspace)


def users_environment(folder: Path) -> LocalEnvironment:
    workspace = open_user_workspace(folder, Agreeing(), Agreeing())
    return LocalEnvironment(toolset("Standard"), workspace)


async def play(
    environment: RolloutEnvironment,
) -> Sequence[tuple[list[ToolCall], list[ToolOutcome]]]:
    played = []
    for number, turn in enumerate(TURNS):
        calls = [ToolCall(f"{number}.{place}", *call) for place, call in enumerate(turn)]
        played.append((calls, list(await environment.run(calls))))
    return played


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "user"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read_tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def lease_folder(driver: ProcessDriver, users_folder: Path) -> Path:
    folder = driver.leases / "a"
    shutil.copytree(users_folder, folder / "workspace")
    for entry in (folder / "workspace", *(folder / "workspace").rglob("*")):
        shutil.chown(entry, *driver.owner())
    return folder


async def replay_calls(log: CallLog, environment: RolloutEnvironment) -> None:
    for turn in log.calls_to_replay():
        check_replay(turn, await environment.run([logged.call for logged in turn]))


async def test_the_same_calls_have_the_same_results(
    driver: ProcessDriver, users_folder: Path
) -> None:
    lease = lease_folder(driver, users_folder)
    trained = await play(training_environment(driver, lease))
    used = await play(users_environment(users_folder))
    for (calls, there), (_, here) in zip(trained, used, strict=True):
        for call, one, other in zip(calls, there, here, strict=True):
            assert (one.content, one.kind, one.omitted_bytes) == (
                other.content,
                other.kind,
                other.omitted_bytes,
            ), call
    assert read_tree(users_folder) == read_tree(lease / "workspace")


async def test_a_users_conversation_replays_in_a_training_environment(
    driver: ProcessDriver, users_folder: Path
) -> None:
    lease = lease_folder(driver, users_folder)
    log = CallLog(toolset("Standard").tools)
    for calls, outcomes in await play(users_environment(users_folder)):
        log.add(calls, outcomes)
    environment = training_environment(driver, lease)
    await replay_calls(log, environment)
    # The same calls on what they have changed give other results, and the first one is named.
    with pytest.raises(DivergedError, match="search_replace"):
        await replay_calls(log, environment)


def test_commands_have_the_variables_of_a_sandbox_that_change_what_programs_print() -> None:
    given = sandbox_layout.ENVIRONMENT
    assert {name: given[name] for name in ENVIRONMENT} == ENVIRONMENT
    assert set(given) - set(ENVIRONMENT) == {"HOME", "PATH", "USER"}
