"""Tools shown by the chat template, and calls in the model's own form."""

import json
from pathlib import Path

import pytest
from tests.support.native_template import CALLS, MESSAGES, TEMPLATE, TOOLS, write_call

from etude.agent.chat import ChatFormat
from etude.agent.chat.native_form import find_native_form
from etude.agent.chat.pieces import PieceReader
from etude.agent.chat.trial import check_chat_format
from etude.agent.local import LocalEnvironment, ScriptedSampler
from etude.agent.rollout import run_rollout
from etude.agent.token_policy import RolloutLimits, RolloutTask
from etude.agent.toolsets import list_schemas, tool_schema, toolset
from etude.agent.trajectory import RolloutEnding, Trajectory
from etude.agent.workspace import ExecResult, MemoryWorkspace
from etude.common.errors import UserError

MODEL = Path(__file__).parent / "model"
ONE_CALL = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call a turn') }}{% endif %}"
READ = write_call("read_file", path="a.py")
GREP = write_call("grep", pattern="x")
BROKEN = '\n<tool_call>\n{"name": "grep", "arguments": ["x"]}\n</tool_call>'


def write_model(folder: Path, template: str) -> Path:
    (folder / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


async def no_shell(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(f"no command should run: {command} {timeout_s}")


async def roll_out(chat: ChatFormat, *turns: str, tools: str = "Compact") -> Trajectory:
    shown = toolset(tools)
    shown = shown.with_form(find_native_form(chat, shown.schemas()))
    return await run_rollout(
        ScriptedSampler(chat, iter(turns)),
        LocalEnvironment(shown, MemoryWorkspace({"a.py": b"x = 1\n"}, no_shell)),
        chat,
        shown,
        RolloutLimits(max_turns=8, max_turn_tokens=400, max_tokens=40_000, timeout_s=60),
        RolloutTask(instruction="Fix it."),
    )


async def test_a_rollout_is_what_the_template_writes_around_sampled_turns(tmp_path: Path) -> None:
    chat = ChatFormat.load(write_model(tmp_path, TEMPLATE))
    done = await roll_out(chat, READ, "Both." + GREP + READ, "Done.")
    (link,) = done.links
    schemas = [tool_schema(name, tool) for name, tool in toolset("Compact").tools.items()]
    shown = "".join(json.dumps(schema) + "\n" for schema in schemas)
    assert chat.decode(link.token_ids) == (
        f"<|system|>{shown}<|end|><|system|>Fix the bug.<|end|><|user|>Fix it.<|end|>"
        f"<|assistant|>{READ}<|end|>"
        "<|tool|>read_file: <tool_response>x = 1</tool_response><|end|>"
        f"<|assistant|>Both.{GREP}{READ}<|end|>"
        "<|tool|>grep: <tool_response>a.py: x = 1</tool_response><|end|>"
        "<|tool|>read_file: <tool_response>x = 1</tool_response><|end|>"
        "<|assistant|>Done.<|end|>"
    )
    own = [token for token, mask in zip(link.token_ids, link.loss_mask, strict=True) if mask]
    assert own == [
        token for text in (READ, f"Both.{GREP}{READ}", "Done.") for token in chat.completion(text)
    ]
    assert (done.ending, done.final_message) == (RolloutEnding.STOPPED, "Done.")
    assert [call.name for call in done.calls] == ["read_file", "grep", "read_file"]


async def test_messages_are_found_where_tools_stand_between_them(tmp_path: Path) -> None:
    tools = TOOLS.replace("<|system|>", "<tool_response>").replace("<|end|>", "</tool_response>")
    shown = "{% if loop.index0 == 1 %}" + tools + "{% endif %}"
    messages = MESSAGES.replace("CALLS", CALLS)
    template = messages.replace("messages %}", "messages %}" + shown, 1)
    chat = ChatFormat.load(write_model(tmp_path, template))
    (link,) = (await roll_out(chat, READ, "Done.")).links
    prompt = link.token_ids[: list(link.loss_mask).index(True)]
    pieces = PieceReader.of(chat, list_schemas()).read_opening(prompt)
    assert [piece[:2] for piece in pieces] == [
        ("system", "Fix the bug."),
        ("user", "Fix it."),
        ("assistant", ""),
    ]
    assert (pieces[0].start, pieces[-1].end) == (0, len(prompt))


async def test_calls_in_another_spelling_stay_as_they_were_sampled(tmp_path: Path) -> None:
    chat = ChatFormat.load(write_model(tmp_path, TEMPLATE))
    spaced = '<tool_call>{ "arguments" : {"path":"a.py"}, "name":"read_file" }</tool_call>'
    done = await roll_out(chat, spaced, "Done.")
    (link,) = done.links
    assert f"<|assistant|>{spaced}<|end|><|tool|>read_file: " in chat.decode(link.token_ids)


async def test_malformed_and_unknown_calls_are_answered_in_words_and_counted(
    tmp_path: Path,
) -> None:
    chat = ChatFormat.load(write_model(tmp_path, TEMPLATE))
    done = await roll_out(
        chat, BROKEN + READ, write_call("fly", to="Mars"), "Done.", tools="Standard"
    )
    (link,) = done.links
    text = chat.decode(link.token_ids)
    assert "Error: malformed call: in <tool_call>: the arguments are not a JSON object" in text
    assert "x = 1" in text
    assert "fly: <tool_response>Error: no tool 'fly'" in text
    assert (done.costs.tool_calls, done.costs.malformed_calls) == (3, 2)
    assert [call.name for call in done.calls] == ["", "read_file", "fly"]


async def test_a_turn_that_the_template_refuses_goes_on_as_text(tmp_path: Path) -> None:
    template = TOOLS + MESSAGES.replace("CALLS", ONE_CALL + CALLS)
    chat = ChatFormat.load(write_model(tmp_path, template))
    done = await roll_out(chat, GREP + READ, READ, "Done.")
    (link,) = done.links
    text = chat.decode(link.token_ids)
    assert text.count("<tool_response>x = 1</tool_response>") == 2
    assert "<tool_response>a.py: x = 1</tool_response>" in text
    assert done.ending is RolloutEnding.STOPPED


async def test_a_template_that_takes_arguments_as_text_gets_text(tmp_path: Path) -> None:
    as_text = CALLS.replace(
        "{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"
    )
    chat = ChatFormat.load(write_model(tmp_path, TOOLS + MESSAGES.replace("CALLS", as_text)))
    shown = find_native_form(chat, toolset("Compact").schemas()).shown
    assert shown is not None
    assert shown.has_text_arguments
    done = await roll_out(chat, READ, "Done.")
    assert "x = 1" in chat.decode(done.links[0].token_ids)


async def test_a_template_that_opens_thinking_and_drops_it_later_takes_calls(
    tmp_path: Path,
) -> None:
    template = TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
    template = template.replace("m.content }}", "m.content.split('</think>')[-1] }}")
    chat = ChatFormat.load(write_model(tmp_path, template))
    done = await roll_out(chat, f"why</think>{READ}", f"so</think>{GREP}", "so</think>Done.")
    assert [call.name for call in done.calls] == ["read_file", "grep"]
    assert done.final_message == "Done."


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (MESSAGES.replace("CALLS", ""), "shows no form of tool calls"),
        (MESSAGES.replace("CALLS", CALLS), "does not show the tools that it is given: read_file"),
        (TOOLS + MESSAGES.replace("CALLS", "{# <tool_call> #}"), "does not render calls"),
        (TOOLS + MESSAGES.replace("CALLS", CALLS.replace('"name"', '"tool"')), "not the form"),
        ("{{ tools.no.such }}" + TEMPLATE, "fails with tools"),
    ],
    ids=["no form", "no tools", "no calls", "another form", "raises"],
)
def test_a_template_without_tools_is_refused_by_the_field(
    tmp_path: Path, template: str, what: str
) -> None:
    template = template.replace(
        "{{ tools.no.such }}", "{% if tools %}{{ tools.no.such }}{% endif %}"
    )
    folder = write_model(tmp_path, template)
    check_chat_format(folder)
    with pytest.raises(UserError, match=rf"rollout.toolFormat(.|\n)*{what}(.|\n)*toolFormat: Xml"):
        check_chat_format(folder, native_tools=[toolset("Compact").schemas()])
