"""Cutting the middle out of long text."""

import re

from hypothesis import given
from hypothesis import strategies as st

from etude.agent.tools.truncation import Dropped, truncate

MARKER = re.compile(r"\n\[\.\.\. (\d+) lines, (\d+) bytes omitted; read it in parts \.\.\.\]\n")
texts = st.text(alphabet="ab\né€😀", max_size=400)


def test_a_text_within_its_cap_is_unchanged() -> None:
    assert truncate("abc", cap_bytes=3, rest="…") == ("abc", 0)


def test_the_head_gets_a_quarter_and_both_ends_are_whole_lines() -> None:
    text = "".join(f"line {number:03}\n" for number in range(100))
    cut = truncate(text, cap_bytes=80, rest="read it in parts")
    assert cut.text == (
        "line 000\nline 001"
        "\n[... 93 lines, 829 bytes omitted; read it in parts ...]\n"
        "line 094\nline 095\nline 096\nline 097\nline 098\nline 099\n"
    )


def test_one_endless_line_is_cut_between_characters() -> None:
    cut = truncate("é" * 100, cap_bytes=10, rest="read it in parts")
    assert cut.text == "é\n[... 0 lines, 190 bytes omitted; read it in parts ...]\n" + "é" * 4


def test_broken_utf8_is_replaced_before_bytes_are_counted() -> None:
    cut = truncate(b"\xff" * 100, cap_bytes=9, rest="read it in parts")
    assert cut.text == "\n[... 0 lines, 294 bytes omitted; read it in parts ...]\n\ufffd\ufffd"


@given(texts, st.integers(min_value=1, max_value=200))
def test_a_cut_is_exact_to_the_byte(text: str, cap: int) -> None:
    cut = truncate(text, cap_bytes=cap, rest="read it in parts")
    if len(text.encode()) <= cap:
        assert cut == (text, 0)
        return
    marker = MARKER.search(cut.text)
    assert marker is not None
    head, tail = cut.text[: marker.start()], cut.text[marker.end() :]
    data = text.encode()
    assert data.startswith(head.encode())
    assert data.endswith(tail.encode())
    assert len(head.encode()) <= cap // 4
    assert len(tail.encode()) <= cap - cap // 4
    omitted = data[len(head.encode()) : len(data) - len(tail.encode())]
    assert cut.omitted_bytes == len(omitted) == int(marker[2])
    assert omitted.count(b"\n") == int(marker[1])


@given(texts, texts, texts, st.integers(min_value=1, max_value=60))
def test_a_stream_without_its_middle_is_cut_like_the_whole_stream(
    head: str, middle: str, tail: str, cap: int
) -> None:
    # The runner keeps far more of both ends than any cap, so that the cuts are the same.
    head, tail = head + "\n" * 60, "\n" * 60 + tail
    dropped = Dropped(len(middle.encode()), middle.count("\n"))
    whole = truncate(head + middle + tail, cap_bytes=cap, rest="read it in parts")
    kept = truncate(head + tail, cap_bytes=cap, rest="read it in parts", dropped=dropped)
    assert kept == whole
