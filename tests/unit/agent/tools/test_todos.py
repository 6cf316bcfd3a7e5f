"""The policy's list of todos: replaced, merged, and told back."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.tool_calls import ParsedCall, parse_calls, render_call
from etude.agent.tools.base import ErrorKind, ToolOutcome
from etude.agent.toolsets import run_calls, toolset
from etude.agent.workspace import ExecResult, FolderNotes, MemoryWorkspace


async def no_shell(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(f"no command should run: {command} {timeout_s}")


def workspace() -> MemoryWorkspace:
    return MemoryWorkspace({}, no_shell)


async def write(made: MemoryWorkspace, *todos: object, **more: object) -> ToolOutcome:
    call = ParsedCall(name="todo_write", arguments={"todos": list(todos), **more})
    (outcome,) = await run_calls(toolset("Standard"), made, [call])
    return outcome


def todo(name: str, **more: str) -> dict[str, str]:
    return {"id": name, **more}


async def test_a_list_is_told_back_with_how_far_it_is() -> None:
    outcome = await write(
        workspace(),
        todo("1", content="read\nthe code", status="completed"),
        todo("2", content="fix it", status="in_progress"),
        todo("b", content="test"),
        todo("c", content="celebrate", status="cancelled"),
    )
    assert outcome.content == (
        "4 todos, 2 open:\n[x] 1: read the code\n[>] 2: fix it\n[ ] b: test\n[-] c: celebrate"
    )
    assert (await write(workspace())).content == "The list is empty."


async def test_merging_changes_what_is_given_and_keeps_the_rest() -> None:
    made = workspace()
    await write(made, todo("1", content="read", status="in_progress"), todo("2", content="fix"))
    outcome = await write(made, todo("2", status="completed"), todo("3", content="x"), merge=True)
    assert outcome.content == "3 todos, 2 open:\n[>] 1: read\n[x] 2: fix\n[ ] 3: x"
    assert (await write(made, todo("3", content="y"))).content == "1 todos, 1 open:\n[ ] 3: y"


@pytest.mark.parametrize(
    ("todos", "text"),
    [
        ([todo("1", content="a"), todo("1", content="b")], "todo '1' is given twice"),
        ([todo("1")], "todo '1' has no content"),
        ([todo("1", content=" \n")], "todo '1' has no content"),
        ([todo("", content="a")], "'todos'"),
        ([todo("a\nb", content="a")], "'todos'"),
        ([todo("1", content="a", status="done")], "'todos'"),
        ([todo("1", content="a", priority="high")], "'todos'"),
        ([todo(str(n), content="a") for n in range(101)], "'todos'"),
    ],
)
async def test_a_wrong_list_is_refused_and_changes_nothing(todos: list[object], text: str) -> None:
    made = workspace()
    await write(made, todo("0", content="keep"))
    outcome = await write(made, *todos)
    assert outcome.is_error
    assert text in outcome.content
    assert (await write(made, merge=True)).content == "1 todos, 1 open:\n[ ] 0: keep"


async def test_a_merged_list_has_the_same_limit() -> None:
    made = workspace()
    await write(made, *(todo(str(n), content="a") for n in range(100)))
    outcome = await write(made, todo("more", content="a"), merge=True)
    assert outcome.content == "Error: 101 todos; the list takes 100"


async def test_completions_give_the_list_as_json() -> None:
    text = render_call(
        "todo_write", {"todos": json.dumps([todo("1", content="a")]), "merge": "true"}
    )
    outcomes = await run_calls(toolset("Standard"), workspace(), parse_calls(text).calls)
    assert outcomes[0].content == "1 todos, 1 open:\n[ ] 1: a"
    text = render_call("todo_write", {"todos": "1. a"})
    outcomes = await run_calls(toolset("Standard"), workspace(), parse_calls(text).calls)
    assert outcomes[0].content == "Error: todo_write: argument 'todos': is no JSON list"
    assert outcomes[0].kind is ErrorKind.INVALID


async def test_the_list_outlives_the_process_where_notes_do(tmp_path: Path) -> None:
    made = workspace()
    made.notes = FolderNotes(tmp_path / "notes")
    await write(made, todo("1", content="a"))
    successor = workspace()
    successor.notes = FolderNotes(tmp_path / "notes")
    outcome = await write(successor, todo("1", status="completed"), merge=True)
    assert outcome.content == "1 todos, 0 open:\n[x] 1: a"
    assert successor.files == {}


statuses = st.sampled_from(["pending", "in_progress", "completed", "cancelled"])
lists = st.dictionaries(st.sampled_from("abc"), statuses, max_size=3)


@given(lists, lists)
def test_merging_is_an_update_of_a_dictionary(first: dict[str, str], then: dict[str, str]) -> None:
    def listed(values: dict[str, str]) -> list[object]:
        return [todo(name, content=name, status=status) for name, status in values.items()]

    async def both() -> tuple[str, str]:
        made = workspace()
        await write(made, *listed(first))
        merged = await write(made, *listed(then), merge=True)
        return merged.content, (await write(workspace(), *listed({**first, **then}))).content

    one, other = asyncio.run(both())
    assert one == other


def test_a_note_without_a_usable_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a valid name of a note"):
        FolderNotes(tmp_path).store("../x", b"")
