"""What holds for every tool format: nothing is lost, prefixes are safe, time is linear."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.tool_calls import MalformedCall, ParsedCall, ParsedCompletion
from etude.agent.tool_formats.base import ToolFormat
from etude.agent.tool_formats.registry import DETECTIONS
from etude.agent.tool_formats.xml import as_texts

FORMATS = [detection.tool_format for detection in DETECTIONS]
TYPELESS = {"xml", "glm"}
"""Formats in which every value is text."""
every_format = pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)

PIECES = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>"),
    *("</parameter>", "<arg_key>k</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", ";", "f", "[", "]", ","),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "function", "```json\n", "\n```", "\n"),
    *("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">'),
    *("</｜DSML｜invoke>", '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>"),
    *('<｜DSML｜parameter name="b" string="false">', '"', "\\", "{", "}", " ", "é"),
    *('{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": "', '"}}', "{}"),
    *('{"a": "', '"}', "[TOOL_CALLS]f[ARGS]{}", "<tool_call>g</tool_call>", "<", "</tool_"),
]
hostile_texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=10).map("".join)
names = st.from_regex(r"[a-z_][a-z_0-9.-]{0,7}", fullmatch=True)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=12) | hostile_texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
calls = st.builds(ParsedCall, name=names, arguments=st.dictionaries(names, json_values, max_size=4))
messages = st.text(max_size=30) | hostile_texts


def well_formed(parsed: ParsedCompletion) -> list[ParsedCall]:
    return [call for call in parsed.calls if isinstance(call, ParsedCall)]


@every_format
@given(text=hostile_texts)
def test_no_text_is_ever_lost(tool_format: ToolFormat, text: str) -> None:
    parsed = tool_format.parse(text)
    rebuilt, rest = "", parsed.message
    for call in parsed.calls:
        gap = call.start - len(rebuilt)
        rebuilt += rest[:gap] + call.raw
        rest = rest[gap:]
    assert rebuilt + rest == text


@every_format
@given(text=hostile_texts)
def test_the_beginning_of_a_text_has_no_call_that_the_whole_has_not(
    tool_format: ToolFormat, text: str
) -> None:
    whole = well_formed(tool_format.parse(text))
    for end in range(len(text)):
        begun = well_formed(tool_format.parse(text[:end]))
        assert begun == whole[: len(begun)], text[:end]


@every_format
@given(turn=st.lists(calls, max_size=3), message=messages)
def test_what_is_rendered_is_read_back(
    tool_format: ToolFormat, turn: list[ParsedCall], message: str
) -> None:
    meant = [as_texts(call) for call in turn] if tool_format.name in TYPELESS else turn
    try:
        text = tool_format.render(turn, message)
    except ValueError as error:
        assert "no text of the format" in str(error)  # noqa: PT017 - either outcome is right
        return
    parsed = tool_format.parse(text)
    assert parsed == ParsedCompletion(tuple(meant), message)
    for end in range(len(text)):
        begun = well_formed(tool_format.parse(text[:end]))
        assert begun == meant[: len(begun)]


@every_format
@given(turn=st.lists(calls, min_size=1, max_size=3), message=st.text("abc é\n.", max_size=20))
def test_values_without_tags_can_be_rendered(
    tool_format: ToolFormat, turn: list[ParsedCall], message: str
) -> None:
    plain = [
        ParsedCall(name=call.name, arguments=dict.fromkeys(call.arguments, 'a\n"b" \\ é\t'))
        for call in turn
    ]
    assert tool_format.parse(tool_format.render(plain, message)) == ParsedCompletion(
        tuple(plain), message
    )


@every_format
def test_values_keep_their_json_types(tool_format: ToolFormat) -> None:
    arguments = {"a": 1, "b": 1.0, "c": 10**30, "d": True, "e": None, "f": [{"x": "1"}], "g": "1"}
    call = ParsedCall(name="f", arguments=arguments)
    (read,) = well_formed(tool_format.parse(tool_format.render([call])))
    if tool_format.name in TYPELESS:
        assert read == as_texts(call)
    else:
        assert repr(read.arguments) == repr(arguments)


@every_format
def test_a_hostile_turn_costs_time_in_proportion_to_its_length(tool_format: ToolFormat) -> None:
    # 150 turns of 20 kB: quadratic work would take minutes of CPU, linear work about a second. Each
    # tail leaves strings, lists or escapes open before the next tag.
    opening = "<｜tool▁calls▁begin｜><｜DSML｜tool_calls>"
    started = time.process_time()
    for piece in PIECES:
        for tail in ("", '"\\', '{"a": "'):
            unit = piece + tail
            tool_format.parse(opening + unit * (20_000 // len(unit)))
    tool_format.parse("<tool_call>" * 100_000)
    assert time.process_time() - started < 30


@every_format
@pytest.mark.parametrize("closing", ["", "]" * 50_000])
def test_deep_nesting_is_malformed(tool_format: ToolFormat, closing: str) -> None:
    deep = "[" * 50_000 + closing
    call = ParsedCall(name="f", arguments={"a": 7654})
    text = tool_format.render([call]).replace("7654", deep)
    parsed = tool_format.parse(text)
    if tool_format.name not in TYPELESS:
        assert not well_formed(parsed)
        assert isinstance(parsed.calls[0], MalformedCall)


@pytest.mark.parametrize(
    "tool_format",
    # The others write one sequence in a turn, which ends where it is broken.
    [each for each in FORMATS if each.name not in {"llama3", "mistral_list"}],
    ids=lambda each: each.name,
)
def test_a_broken_call_does_not_swallow_the_next_one(tool_format: ToolFormat) -> None:
    good = ParsedCall(name="g", arguments={"a": "1"})
    whole = tool_format.render([ParsedCall(name="f", arguments={"abc": "xyz"})])
    next_one = tool_format.render([good])
    broken = whole[: whole.index("abc")]
    parsed = tool_format.parse(broken + next_one)
    assert isinstance(parsed.calls[0], MalformedCall)
    assert well_formed(parsed) == [good]
