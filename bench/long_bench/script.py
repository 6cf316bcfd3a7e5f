"""Turns of a scripted policy: some words, and a call that reads a file."""

from etude.agent.chat import ChatFormat
from etude.agent.tool_calls import render_call

FILE = "log.txt"
SAMPLED_TOKENS = 700
"""Words of a turn, before its call."""
_LINE = "x = 1 # one " * 30 + "\n"
"""Long, so that the numbers of lines are few tokens beside it."""


def write_turn(chat: ChatFormat, number: int) -> list[int]:
    """Tokens of a turn; each has another number, so that no two are alike."""
    text = f"{number}: " + "we look. " * SAMPLED_TOKENS
    words = chat.encode_text(text)[:SAMPLED_TOKENS]
    return [*words, *chat.completion(render_call("read_file", {"path": FILE}))]


def write_file(chat: ChatFormat, tokens: int) -> str:
    """Text of a file of so many tokens."""
    return chat.decode(chat.encode_text(_LINE * (1 + tokens // 50))[:tokens])
