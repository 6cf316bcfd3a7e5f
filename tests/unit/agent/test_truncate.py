"""Cutting the middle out, and recording streams that never end."""

import re

from hypothesis import given
from hypothesis import strategies as st

from etude.agent.tools.truncate import Dropped, Tape, truncate

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


@given(st.lists(texts, max_size=20), st.integers(min_value=1, max_value=60))
def test_a_taped_stream_is_cut_like_the_whole_stream(chunks: list[str], cap: int) -> None:
    stream = "".join(chunks).encode()
    # Bytes arrive cut anywhere, also within a character.
    tape = Tape(head_bytes=64, tail_bytes=128)
    for start in range(0, len(stream), 7):
        tape.add(stream[start : start + 7])
    dropped = tape.finish()
    assert len(tape.output) <= 64 + 128
    assert len(tape.output) + dropped.num_bytes == len(stream)
    whole = truncate(stream, cap_bytes=cap, rest="read it in parts")
    taped = truncate(tape.output, cap_bytes=cap, rest="read it in parts", dropped=dropped)
    assert taped == whole


def test_a_short_stream_is_taped_whole() -> None:
    tape = Tape()
    tape.add(b"one\n")
    tape.add(b"")
    assert tape.finish() == Dropped(0, 0)
    assert tape.output == b"one\n"
