"""Users work with a policy through the `openai` client and a real gateway."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from tests.support.gateway.served import MODEL, PlayedEngine, serve_gateway

from etude.agent.chat import ChatFormat
from etude.agent.tool_calls import render_call
from etude.feedback.simulate.conversations import (
    Conversation,
    ConversationEnd,
    UserDesk,
    find_added_lines,
    run_tests,
)
from etude.feedback.simulate.user_tasks import UserTask, read_tasks
from etude.feedback.simulate.users import draw_users

Work = Callable[..., Awaitable[tuple[Conversation, int]]]
TOKENIZER = Path(__file__).parents[2] / "agent" / "model"
LOOK = render_call("read_file", {"path": "bank/core.py"})
MEND = render_call(
    "search_replace",
    {"path": "bank/core.py", "old_string": "return a - b", "new_string": "return a + b"},
)
TEST = render_call("run_terminal", {"command": "pytest -q"})
BROKEN = LOOK.removesuffix("</tool_call>")


@pytest.fixture
def work(tmp_path: Path, task: UserTask) -> Work:
    """Lets a user work with a policy that says some turns; the conversation, and its records."""

    async def start(*turns: str, num_answers: int = 1) -> tuple[Conversation, int]:
        chat = ChatFormat.load(TOKENIZER)

        def say(prompt: str) -> str:
            return turns[prompt.count("<|assistant|>") - 1]

        (user,) = draw_users(1, seed=0)
        taste = replace(user.taste, num_answers=num_answers)
        async with serve_gateway(tmp_path, [PlayedEngine(chat, say)], {}) as gateway:
            client = openai.AsyncOpenAI(
                base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0
            )
            desk = UserDesk(client, MODEL, task, taste, user.random("visit"))
            seen = await desk.converse()
            records = await gateway.records()
        assert {record.rollout_id for record in records} or seen.ending is ConversationEnd.FAILED
        return seen, len(records)

    return start


async def test_calls_of_the_policy_change_the_users_folder(work: Work, task: UserTask) -> None:
    seen, num_records = await work(LOOK, MEND + TEST, "Done.")
    assert seen.ending is ConversationEnd.FINISHED
    assert task.is_done(seen.files)
    assert not task.is_done(task.files)
    assert [(edit.turn, edit.lines) for edit in seen.edits] == [(1, ("return a + b",))]
    assert seen.is_tested
    assert [turn.num_calls for turn in seen.turns] == [1, 2, 0]
    assert num_records == 3, "a turn was not recorded"


@pytest.mark.parametrize(
    ("turns", "ending"),
    [
        ((BROKEN,), ConversationEnd.BROKEN_CALL),
        (("Which file?", "Which line?"), ConversationEnd.QUESTION),
        (("Which file?", "Done."), ConversationEnd.FINISHED),
        ((LOOK,) * 8, ConversationEnd.TURN_LIMIT),
    ],
)
async def test_a_conversation_ends(
    work: Work, turns: tuple[str, ...], ending: ConversationEnd
) -> None:
    seen, num_records = await work(*turns)
    assert seen.ending is ending
    assert num_records == len(turns)


async def test_a_request_that_fails_is_no_behaviour_of_the_policy(
    task: UserTask,
) -> None:
    (user,) = draw_users(1, seed=0)
    client = openai.AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="x", max_retries=0)
    seen = await UserDesk(client, MODEL, task, user.taste, user.random("x")).converse()
    assert seen.ending is ConversationEnd.FAILED
    assert seen.turns == ()


async def test_the_users_terminal_runs_tests_within_limits(task: UserTask) -> None:
    failed = await run_tests(task.files, 30)
    assert failed.exit_code == 1
    assert b"FAILED test_add_coin" in failed.output
    loops = b"while True:\n    pass\n"
    endless = await run_tests({**task.files, "bank/core.py": loops}, 0.5)
    assert endless.timed_out


def test_added_lines_are_those_that_were_not_there() -> None:
    assert find_added_lines(b"a\n  b\n", b"a\nb\nb\n\nc\n") == ("b", "c")


def test_a_generated_task_is_what_its_user_asks_for(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    for path, text in {
        "task.toml": "",
        "instruction.md": "Fix it.\n",
        "environment/Dockerfile": "FROM x\n",
        "environment/a.py": "1\n",
        "solution/files/a.py": "2\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (task,) = read_tasks(tmp_path)
    assert (task.instruction, task.files) == ("Fix it.", {"a.py": b"1\n"})
    assert task.is_done({"a.py": b"2\n"})
