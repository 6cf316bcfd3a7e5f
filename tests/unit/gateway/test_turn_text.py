"""Text of a turn in pieces: what is given out early is what the whole turn begins with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.chat import ChatFormat
from etude.agent.tool_calls import ParsedCall
from etude.agent.tool_formats.base import ToolFormat
from etude.agent.tool_formats.registry import DETECTIONS
from etude.gateway.tool_forms import TextFormat
from etude.gateway.turn_text import TextSplitter, TokenDecoder, read_turn

FORMATS = [*(each.tool_format for each in DETECTIONS), TextFormat()]
PIECES = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<think>", "</think>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "f", "[", "]", "{", "}", "<", "a < b", "\n"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜DSML｜tool_calls>", " ", "é", "x[0]"),
    *('{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": "', '"}}', "words "),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=10).map("".join)


def split(
    chat: ChatFormat, tool_format: ToolFormat, pieces: list[str], *, is_open: bool = False
) -> list[str]:
    """Thinking and content of pieces, as a client puts them together."""
    splitter = TextSplitter(chat, tool_format, is_open=is_open)
    given_out = ["", ""]
    for piece in pieces:
        for text, is_thinking in splitter.feed(piece):
            given_out[not is_thinking] += text
    parts = read_turn(chat, tool_format, "".join(pieces), is_open=is_open)
    for text, is_thinking in splitter.finish(parts):
        given_out[not is_thinking] += text
    return given_out


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)
@given(pieces=st.lists(texts, max_size=4), is_open=st.booleans())
def test_pieces_add_up_to_the_parts_of_the_whole(
    thinking: ChatFormat, tool_format: ToolFormat, pieces: list[str], *, is_open: bool
) -> None:
    parts = read_turn(thinking, tool_format, "".join(pieces), is_open=is_open)
    given_out = split(thinking, tool_format, pieces, is_open=is_open)
    assert given_out == [parts.thinking, parts.content]


@given(st.lists(texts, max_size=4))
def test_a_text_without_tools_and_thinking_is_its_own_content(
    plain: ChatFormat, pieces: list[str]
) -> None:
    assert split(plain, TextFormat(), pieces) == ["", "".join(pieces)]


@given(st.text(alphabet="aé😀<｜\n", max_size=20), st.integers(1, 4))
def test_decoded_pieces_are_the_decoded_whole(plain: ChatFormat, text: str, size: int) -> None:
    ids = plain.encode_text(text)
    decoder = TokenDecoder(plain)
    pieces = [decoder.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_thinking_content_and_calls_are_told_apart(thinking: ChatFormat) -> None:
    hermes = next(each for each in FORMATS if each.name == "hermes")
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    parts = read_turn(thinking, hermes, f"<think>\nHm.\n</think>\n\nI look.\n{call}", is_open=False)
    assert (parts.thinking, parts.content) == ("\nHm.\n", "I look.")
    assert parts.calls == (ParsedCall(name="f", arguments={"a": 1}),)


def test_a_malformed_call_stays_in_the_content(thinking: ChatFormat) -> None:
    hermes = next(each for each in FORMATS if each.name == "hermes")
    parts = read_turn(thinking, hermes, "I look.<tool_call>{</tool_call>", is_open=False)
    assert (parts.content, parts.calls) == ("I look.<tool_call>{</tool_call>", ())
    assert parts.is_malformed
