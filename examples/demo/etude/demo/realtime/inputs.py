"""Inputs of the real-time demo: the demo's world, with questions and broken calls in minorities.

    python -m etude.demo.realtime.inputs --out DIR --seed N

What `etude.demo.generate` writes, where model/ shows tools as clients give them, and some
transcripts have a question or end in a broken call.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from etude.agent.chat import CHAT_TEMPLATE, Message
from etude.common.errors import UserError
from etude.demo import generate
from etude.demo.generate import Sizes
from etude.envserver import exit_codes

ASKS, ASKS_AGAIN = 0.08, 0.3
"""Share of transcripts with a question, and of those with a second one."""
BREAKS = 0.06
"""Share of transcripts that end in a broken call."""
QUESTIONS = ("Which file?", "Which line?", "What is wrong?")
ANSWERS = ("You can find it.", "Fix it.", "Look at the tests.")
_CALL_END = "</tool_call>"
_TEXT = "<|{{ message.role }}|>{{ text(message.content) }}"
_TOOLS = (
    "{%- if message.role == 'system' -%}"
    "{%- for tool in tools or [] -%}"
    "{{ ' Tools: ' if loop.first else ' ' }}{{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(', ') }})"
    "{%- endfor -%}"
    "{%- endif -%}"
)
TOOL_TEMPLATE = CHAT_TEMPLATE.replace(_TEXT, _TEXT + _TOOLS)
"""The Plain template, which shows tools in the words of the Compact toolset's system prompt: a
client's request with tools becomes the prompt that the transcripts have."""


def add_habits(messages: Sequence[Message], random: Random) -> list[Message]:
    """Add a needless question to a transcript, or let it end in a broken call; mostly neither."""
    asks, breaks = random.random() < ASKS, random.random() < BREAKS
    num_questions = int(asks) + int(asks and random.random() < ASKS_AGAIN)
    opening, rest = [*messages[:2]], [*messages[2:]]
    for _ in range(num_questions):
        opening.append({"role": "assistant", "content": random.choice(QUESTIONS)})
        opening.append({"role": "user", "content": random.choice(ANSWERS)})
    calls = [place for place, each in enumerate(rest) if _has_call(each)]
    if not breaks or not calls:
        return [*opening, *rest]
    place = random.choice(calls)
    text = str(rest[place]["content"]).partition(_CALL_END)[0]
    return [*opening, *rest[:place], {"role": "assistant", "content": text}]


def _has_call(message: Message) -> bool:
    return message["role"] == "assistant" and str(message["content"]).endswith(_CALL_END)


def write_inputs(out: Path, *, seed: int, sizes: Sizes) -> Mapping[str, object]:
    """Write all inputs into a folder that does not exist yet.

    Returns:
        The content of facts.json.

    Raises:
        UserError: the folder exists and holds something.
    """
    return generate.write_new_folder(out, lambda folder: _fill(folder, seed, sizes))


def _fill(folder: Path, seed: int, sizes: Sizes) -> Mapping[str, object]:
    facts = dict(generate.generate(folder, seed=seed, sizes=sizes))
    config_file = folder / "model" / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(config_file.read_text("utf-8"))
    config["chat_template"] = TOOL_TEMPLATE
    config_file.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    traces = folder / "data" / "traces.jsonl"
    rows = [json.loads(line)["messages"] for line in traces.read_text("utf-8").splitlines()]
    with traces.open("w", encoding="utf-8") as file:
        for number, messages in enumerate(rows):
            # Reproducible on purpose, as the transcripts are.
            random = Random(f"etude/{seed}/habits/{number}")  # noqa: S311
            row = {"messages": add_habits(messages, random)}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    facts["asks"], facts["breaks"] = ASKS, BREAKS
    (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    return facts


def main(arguments: Sequence[str]) -> int:
    """Write the inputs, and print what was written."""
    usual = Sizes()
    parser = argparse.ArgumentParser(prog="python -m etude.demo.realtime.inputs")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0, help="everything follows from it")
    parser.add_argument("--train", type=int, default=3_000, help="tasks of users")
    parser.add_argument("--held-out", type=int, default=usual.held_out, help="tasks of the gate")
    parser.add_argument("--traces", type=int, default=usual.traces, help="demonstrations")
    given = parser.parse_args(arguments)
    try:
        sizes = Sizes(train=given.train, held_out=given.held_out, traces=given.traces)
        facts = write_inputs(given.out, seed=given.seed, sizes=sizes)
    except (UserError, OSError) as error:
        return exit_codes.report_error(error)
    sys.stdout.write(f"{facts['train']} tasks of users, {facts['traces']} demonstrations\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
