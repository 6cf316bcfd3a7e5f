"""What the parser takes for a call, what for a malformed one, and that it loses nothing."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etude.agent.tool_calls import (
    MalformedCall,
    ParsedCall,
    call_from_json,
    parse_calls,
    render_call,
)

TAGS = ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"]
PIECES = [*TAGS, "<function=f>", "<parameter=a>", "<parameter=b>", "\n", "x", "é", "<", ">"]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)
names = st.from_regex(r"[a-z_-]{1,8}", fullmatch=True)
values = st.text(max_size=20).filter(lambda v: "tool_call>" not in v and "</parameter>" not in v)


def test_a_call_in_one_line_is_read() -> None:
    found = parse_calls(
        "<tool_call><function=read><parameter=path>a.py</parameter></function></tool_call>"
    )
    assert found.calls == (ParsedCall(name="read", arguments={"path": "a.py"}),)
    assert found.message == ""


def test_newlines_around_tags_are_layout_and_inner_ones_are_value() -> None:
    text = (
        "<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n"
        "<parameter=content>\n\n  x\n\n</parameter>\n</function>\n</tool_call>"
    )
    assert parse_calls(text).calls == (
        ParsedCall(name="write", arguments={"path": "a.py", "content": "\n  x\n"}),
    )


def test_several_calls_and_the_message_around_them_keep_their_order() -> None:
    one, two = render_call("a", {}), render_call("b", {"x": "1"})
    found = parse_calls(f"First {one} then {two}.")
    assert [call.name for call in found.calls if isinstance(call, ParsedCall)] == ["a", "b"]
    assert found.message == "First  then ."


def test_a_value_may_hold_the_closing_tag_of_a_parameter() -> None:
    value = "<parameter name='x'>1</parameter> and <function>"
    assert parse_calls(render_call("write", {"content": value})).calls == (
        ParsedCall(name="write", arguments={"content": value}),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call><function=f></function>", "without </tool_call>"),
        ("<tool_call></tool_call>", "must hold one"),
        ("<tool_call>f()</tool_call>", "must hold one"),
        ("<tool_call><function=></function></tool_call>", "must hold one"),
        ("<tool_call><function=f>x</function></tool_call>", "text between parameters"),
        ("<tool_call><function=f><parameter=a>x</function></tool_call>", "without </parameter>"),
        (
            "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter>"
            "</function></tool_call>",
            "given twice",
        ),
        ("Done.</tool_call>", "outside of <tool_call>"),
        ("<function=f></function>", "outside of <tool_call>"),
        ("<parameter=a>x</parameter>", "outside of <tool_call>"),
    ],
)
def test_a_malformed_call_is_kept_with_its_reason(text: str, reason: str) -> None:
    (found,) = parse_calls(text).calls[:1]
    assert isinstance(found, MalformedCall)
    assert reason in found.reason


def test_a_broken_call_does_not_swallow_the_next_one() -> None:
    good = render_call("f", {"a": "1"})
    for broken in ("<tool_call><function=f><parameter=a>1", "<tool_call><function=f></tool_call>"):
        first, second = parse_calls(broken + good).calls
        assert isinstance(first, MalformedCall)
        assert second == ParsedCall(name="f", arguments={"a": "1"})


@given(texts)
@example("<tool_call>")
@example("</tool_call></tool_call>")
def test_no_text_is_ever_lost(text: str) -> None:
    found = parse_calls(text)
    rebuilt, rest = "", found.message
    for call in found.calls:
        gap = call.start - len(rebuilt)
        rebuilt += rest[:gap] + call.raw
        rest = rest[gap:]
    assert rebuilt + rest == text


@given(texts)
def test_only_a_text_without_any_tag_is_a_message_alone(text: str) -> None:
    has_tag = any(tag in text for tag in TAGS)
    assert bool(parse_calls(text).calls) == has_tag


@given(names, st.dictionaries(names, values, max_size=4))
def test_what_is_rendered_is_read_back(name: str, arguments: dict[str, str]) -> None:
    text = render_call(name, arguments)
    (call,) = parse_calls(text).calls
    assert call == ParsedCall(name=name, arguments=arguments)
    assert call.raw == text


@pytest.mark.parametrize(
    "piece",
    ["<tool_call>", "</tool_call>", "<parameter=a>", "</parameter>", "<tool_call><function=f>"],
)
def test_a_hostile_turn_costs_time_in_proportion_to_its_length(piece: str) -> None:
    # A megabyte of tags: quadratic work would take minutes of CPU, linear work well under a second.
    started = time.process_time()
    parse_calls(piece * (1_000_000 // len(piece)))
    parse_calls("<tool_call><function=f>" + piece * 100_000 + "</function></tool_call>")
    assert time.process_time() - started < 20


def test_arguments_from_the_wire_are_one_json_object() -> None:
    assert call_from_json("f", '{"a": 1, "b": ["x"]}') == ParsedCall(
        name="f", arguments={"a": 1, "b": ["x"]}
    )


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"a": NaN}', "[" * 100_000, '{"a": "\\ud800"}']
)
def test_arguments_that_are_no_json_object_are_malformed(text: str) -> None:
    assert isinstance(call_from_json("f", text), MalformedCall)
