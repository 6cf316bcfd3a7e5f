"""A template that does not tell what follows a turn: the rollout goes on in a new link."""

from pathlib import Path

from etude.agent.chat import ChatFormat
from etude.agent.chat.trial import check_chat_format
from etude.agent.local import LocalEnvironment, ScriptedSampler
from etude.agent.rollout import run_rollout
from etude.agent.token_policy import RolloutLimits, RolloutTask
from etude.agent.tool_calls import render_call
from etude.agent.toolsets import toolset
from etude.agent.trajectory import RolloutEnding
from etude.agent.workspace import ExecResult, MemoryWorkspace

MODEL = Path(__file__).parent / "model"
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
READ = render_call("read_file", {"path": "a.py"})


async def refuse(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(command)


async def test_each_link_is_a_whole_context_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(FORGETFUL)
    check_chat_format(tmp_path)
    chat, tools = ChatFormat.load(tmp_path), toolset("Compact")
    done = await run_rollout(
        ScriptedSampler(chat, iter([READ, "Done."])),
        LocalEnvironment(tools, MemoryWorkspace({"a.py": b"x = 1\n"}, refuse)),
        chat,
        tools,
        RolloutLimits(max_turns=4, max_turn_tokens=200, max_tokens=2_000, timeout_s=60),
        RolloutTask(instruction="Fix it."),
    )
    first, second = done.links
    assert done.ending is RolloutEnding.STOPPED
    assert chat.decode(first.token_ids).endswith(f"<|assistant|>{READ}<|end|>")
    results = "<|user|><tool_response>\nx = 1\n</tool_response><|end|>"
    assert chat.decode(second.token_ids).endswith(f"{results}<|assistant|>Done.<|end|>")
    costs = done.costs
    parts = costs.prompt_tokens + costs.completion_tokens + costs.tool_output_tokens
    assert parts == len(first.token_ids) + len(second.token_ids)
    sampled = sum(first.loss_mask) + sum(second.loss_mask)
    assert sampled == costs.completion_tokens
