"""Table of chat formats against transformers: `python -m tests.harness.chat.table [--help]`.

For each family of models, generated conversations are compared token by token with what
transformers makes of the same messages and tools. The contract tests look for counterexamples;
this counts.
"""

import argparse
import random
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.chat_families import FAMILIES, family_folder
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from etude.agent.chat import ChatFormat, Conversation
from etude.agent.chat.native_form import find_native_form
from etude.agent.chat.thinking import remove_thinking
from etude.agent.tool_calls import ParsedCall, cut_calls
from etude.agent.tool_formats.xml import as_texts
from etude.agent.tool_messages import make_call_message, make_result_messages
from etude.agent.toolsets import Toolset, toolset
from etude.common.errors import InvalidFieldError

PIECES = (
    *(
        " ",
        "\n",
        "\n\n",
        "\t",
        "word",
        "Über",
        "数学",
        "😀",
        "é",
        "def f(x):\n    return x",
        "1234",
    ),
    *("<", ">", "|", "[", "<|", "</", "it's", '{"a": "b"}', "\\n", "{{ x }}", "\\", '"', "한국어"),
)
WORDS = ("Look.", "I call it", "x = 1", "数学")
PATHS = ("a.py", "shop/core.py", "数学 é.py", 'quote".py')
THINKING = dict.fromkeys(("qwen3", "qwen3.6"), "<think>\nHm.\n</think>\n\n")
ONE_CALL = frozenset({"llama3"})
ONLY_CALLS = frozenset({"llama3", "mistral-nemo"})


class Side(NamedTuple):
    """Our format of one family, and transformers' tokenizer."""

    family: str
    chat: ChatFormat
    theirs: Any
    tools: Toolset | None

    def encode(self, messages: Sequence[Any], **options: object) -> list[int]:
        """What transformers makes of messages."""
        return list(self.theirs.apply_chat_template(messages, return_dict=False, **options))

    def text(self, draw: random.Random) -> str:
        """A text that spells out no tag."""
        while True:
            text = "".join(draw.choices(PIECES, k=draw.randrange(7)))
            if draw.random() < 0.3:
                text += "".join(chr(draw.randrange(32, 0xD800)) for _ in range(8))
            # Some tokenizers normalise text, which then decodes to another one.
            is_stable = unicodedata.is_normalized("NFC", text)
            if is_stable and not self.chat.vocabulary.finder.find(text):
                return text


def load(family: str) -> Side:
    """Load one family."""
    folder: Path = family_folder(family)
    chat = ChatFormat.load(folder)
    tools = toolset("Compact")
    native = (
        tools.with_form(find_native_form(chat, tools.schemas()))
        if FAMILIES[family].has_tools
        else None
    )
    return Side(family, chat, PreTrainedTokenizerFast.from_pretrained(folder), native)


def compare_transcript(side: Side, draw: random.Random) -> str:
    """Compare a whole transcript; names what came of it."""
    messages = [{"role": "user", "content": side.text(draw)}]
    if side.chat.traits.has_system and draw.random() < 0.5:
        messages.insert(0, {"role": "system", "content": side.text(draw)})
    for _ in range(draw.randrange(4)):
        messages.append({"role": "assistant", "content": draw.choice(WORDS)})
        if side.chat.traits.has_tool_role and draw.random() < 0.5:
            results = range(draw.randrange(1, 4))
            messages += [{"role": "tool", "content": side.text(draw)} for _ in results]
        else:
            messages.append({"role": "user", "content": side.text(draw)})
    messages.append({"role": "assistant", "content": draw.choice(WORDS)})
    try:
        ids = side.chat.encode_messages(messages).token_ids
    except InvalidFieldError:
        return "refused"
    return "equal" if ids == side.encode(messages) else "different"


def compare_deltas(side: Side, draw: random.Random) -> str:
    """Compare a rollout that is built by deltas with a rendering of the whole."""
    conversation = side.chat.open(side.text(draw), side.text(draw))
    ids = list(conversation.prompt)
    for _ in range(draw.randrange(1, 4)):
        reply = draw.choice(WORDS)
        ids += side.chat.completion(reply)
        conversation.add_completion(reply)
        ids += conversation.append_results([side.text(draw) for _ in range(draw.randrange(1, 4))])
    if conversation.rewrites_history:
        return "rewritten"
    return "equal" if ids == conversation.render_again() else "different"


def draw_calls(side: Side, draw: random.Random) -> list[ParsedCall]:
    """Draw the calls of a turn."""

    def one() -> ParsedCall:
        arguments: dict[str, object] = {"path": draw.choice(PATHS)}
        if draw.random() < 0.5:
            arguments |= {"old_string": side.text(draw), "new_string": side.text(draw)}
        if draw.random() < 0.3:
            arguments |= {"count": draw.randrange(-9, 99), "paths": [draw.choice(PATHS)]}
        return ParsedCall(name=draw.choice(["read_file", "search_replace"]), arguments=arguments)

    return [one() for _ in range(1 if side.family in ONE_CALL else draw.randrange(1, 4))]


def compare_native(side: Side, draw: random.Random, counts: Counter[str]) -> str:
    """Compare a rollout with calls in the family's own format, built turn by turn."""
    tools = side.tools
    assert tools is not None
    assert tools.shown is not None
    shown = {"tools": list(tools.shown.schemas), "add_generation_prompt": True}
    user = side.text(draw)
    conversation = side.chat.open(tools.system_prompt, user, tools.shown)
    messages: list[Any] = [{"role": "system", "content": tools.system_prompt}]
    messages.append({"role": "user", "content": user})
    ids = list(conversation.prompt)
    if ids != side.encode(messages, **shown):
        return "different"
    num_calls = 0
    for _ in range(draw.randrange(1, 4)):
        calls = draw_calls(side, draw)
        content = "" if side.family in ONLY_CALLS else draw.choice(("", *WORDS))
        content = THINKING.get(side.family, "") + content
        turn = make_call_message(tools.shown, content, calls, first=num_calls)
        num_calls += len(calls)
        results = [side.text(draw) for _ in calls]
        messages += [turn, *make_result_messages(turn, results)]
        whole = side.encode(messages, **shown)
        end = next(i for i in range(len(ids), len(whole)) if whole[i] in side.chat.end_ids)
        text = side.chat.decode(whole[len(ids) : end])
        found = read_turn(side, tools, conversation, text)
        typed = [as_texts(call) if tools.tool_format.name == "xml" else call for call in calls]
        counts["calls"] += len(calls)
        counts["calls read"] += sum(one == other for one, other in zip(found, typed, strict=False))
        ids = whole[: end + 1] + conversation.append_results(results)
        if ids != whole:
            return "different"
    return "equal" if ids == conversation.render_again() else "different"


def read_turn(
    side: Side, tools: Toolset, conversation: Conversation, text: str
) -> list[ParsedCall]:
    """Read a sampled text as a rollout does, and note it."""
    spoken = remove_thinking(
        side.chat, text, tools.tool_format, is_open=conversation.opens_thinking
    )
    parsed = tools.tool_format.parse(spoken).calls
    found = [call for call in parsed if isinstance(call, ParsedCall)]
    conversation.add_completion(text, content=cut_calls(text, found), calls=found)
    return found


def plant_tags(side: Side) -> Iterator[bool]:
    """Plant each tag in system prompt, instruction, argument and results; true if harmless."""
    tags = frozenset(side.chat.vocabulary.tags.values())

    def roll_out(text: str) -> list[int]:
        shown = None if side.tools is None else side.tools.shown
        conversation = side.chat.open(text, text, shown)
        calls = [ParsedCall(name="read_file", arguments={"path": text, text: "x"})]
        conversation.add_completion("It was sampled.", calls=calls if shown else ())
        ids = conversation.prompt + conversation.append_results([text])
        return [token for token in ids if token in tags]

    expected = roll_out("a b")
    for tag in side.chat.vocabulary.tags:
        yield roll_out(f"a{tag} b") == expected


def write_row(family: str, count: int, rollouts: int, seed: int) -> str:
    """Compare one family; its row of the table."""
    started_s = time.process_time()
    side, draw = load(family), random.Random(f"{seed} {family}")
    transcripts = Counter(compare_transcript(side, draw) for _ in range(count))
    deltas = Counter(compare_deltas(side, draw) for _ in range(count))
    planted = Counter(plant_tags(side))
    cells = [_tell(transcripts), _tell(deltas), f"{planted[True]} of {planted.total()}"]
    if side.tools is None:
        cells += ["-", "-"]
    else:
        calls: Counter[str] = Counter()
        native = Counter(compare_native(side, draw, calls) for _ in range(rollouts))
        cells += [_tell(native), f"{calls['calls read']:,} of {calls['calls']:,}"]
    return f"| {family} | {' | '.join(cells)} | {time.process_time() - started_s:.0f} |"


def _tell(outcomes: Counter[str]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in outcomes.most_common())


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--conversations", type=int, default=5_000)
    parser.add_argument("--rollouts", type=int, default=5_000, help="with native calls")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.set_verbosity_error()
    names = ["family", "transcripts", "deltas", "tags planted and harmless"]
    names += ["native rollouts", "calls read back", "CPU s"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)  # noqa: T201 - a table
    for family in given.families:
        print(write_row(family, given.conversations, given.rollouts, given.seed), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
