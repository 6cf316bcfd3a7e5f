"""The parser of what a guest sends, which may be anything."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.guest import frames
from etude.envserver.guest.frames import BadFrameError, Frame, FrameKind, FrameParser

NONCE = bytes(range(16))
honest = st.builds(
    Frame,
    st.integers(1, 2**32 - 1),
    st.sampled_from([FrameKind.DATA, FrameKind.RESULT]),
    st.integers(0, 255),
    st.binary(max_size=200),
)


def cut(parser: FrameParser, data: bytes, sizes: list[int]) -> list[Frame]:
    found: list[Frame] = []
    for size in [*sizes, len(data)]:
        piece, data = data[:size], data[size:]
        found += parser.feed(piece)
    return found


@given(st.lists(honest, max_size=8), st.lists(st.integers(0, 40), max_size=30))
def test_frames_arrive_however_the_bytes_are_cut(sent: list[Frame], sizes: list[int]) -> None:
    data = b"".join(frame.encoded() for frame in sent)
    assert cut(FrameParser(frames.FROM_GUEST), data, sizes) == sent


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"\5\0\0\0" + bytes(5), "5 bytes"),
        (b"\0\0\0\0", "0 bytes"),
        (b"\7\0\1\0", "65543 bytes"),
        (b"\xff\xff\xff\xff", "4294967295 bytes"),
        (b"\6\0\0\0" + b"\1\0\0\0" + b"\x77\0", "0x77"),
        (Frame(1, FrameKind.CALL).encoded(), "0x10"),
        (Frame(0, FrameKind.DATA).encoded(), "DATA on stream 0"),
        (Frame(3, FrameKind.EVENT).encoded(), "EVENT on stream 3"),
        (Frame(1, FrameKind.CREDIT, 0, b"\1\2\3").encoded(), "CREDIT with 3"),
        (Frame(0, FrameKind.PONG, 0, bytes(65)).encoded(), "PONG with 65"),
        (Frame(0, FrameKind.RESET_ACK, 0, bytes(23)).encoded(), "RESET_ACK with 23"),
    ],
)
def test_what_is_no_frame_of_a_guest_is_refused(data: bytes, named: str) -> None:
    with pytest.raises(BadFrameError, match=named):
        list(FrameParser(frames.FROM_GUEST).feed(data))


@given(st.binary(max_size=300), st.lists(st.integers(0, 40), max_size=30), st.binary(max_size=40))
def test_the_answer_to_a_reset_is_found_behind_anything(
    before: bytes, sizes: list[int], body: bytes
) -> None:
    parser = FrameParser(frames.FROM_GUEST)
    assert list(parser.feed(Frame(1, FrameKind.DATA, 0, bytes(50)).encoded()[:30])) == []
    parser.seek_ack(NONCE)
    ack, after = frames.reset_ack_frame(NONCE, 7, body), Frame(0, FrameKind.PONG)
    data = before + ack.encoded() + after.encoded()
    assert cut(parser, data, sizes) == [ack, after]
    assert frames.reset_fields(ack) == (NONCE, 7, body)


def test_a_nonce_that_is_echoed_elsewhere_is_no_answer() -> None:
    parser = FrameParser(frames.FROM_GUEST)
    parser.seek_ack(NONCE)
    forged = Frame(1, FrameKind.DATA, 0, NONCE).encoded() + NONCE + bytes(10) + NONCE
    assert list(parser.feed(forged)) == []
    ack = frames.reset_ack_frame(NONCE, 1, b"")
    assert list(parser.feed(ack.encoded())) == [ack]


@given(
    st.binary(max_size=200).filter(lambda noise: frames.MAGIC not in noise),
    st.lists(st.integers(0, 40), max_size=20),
)
def test_a_guest_finds_the_reset_behind_anything(before: bytes, sizes: list[int]) -> None:
    parser = FrameParser(frames.FROM_HOST)
    parser.seek_reset()
    reset = frames.reset_frame(NONCE, 3)
    assert cut(parser, before + reset.encoded(), sizes) == [reset]


def test_100_000_strings_of_noise_neither_crash_nor_swell_the_parser() -> None:
    noise = random.Random(0)
    kinds = [*range(0x25), 0xFF]
    refused = 0
    for number in range(100_000):
        parser = FrameParser(frames.FROM_GUEST)
        if number % 3 == 0:
            parser.seek_ack(NONCE)
        data = noise.randbytes(noise.randrange(64))
        if number % 2:  # half of them begin like a frame
            length = noise.choice([0, 5, 6, 10, 40, 65_542, 65_543, 2**31, 2**32 - 1])
            stream, kind = noise.choice([0, 1, 2**32 - 1]), noise.choice(kinds)
            data = (
                length.to_bytes(4, "little") + stream.to_bytes(4, "little") + bytes([kind]) + data
            )
        try:
            for frame in parser.feed(data):
                assert len(frame.payload) <= frames.MAX_PAYLOAD
        except BadFrameError:
            refused += 1
        assert len(parser._held) <= len(data)
    assert 10_000 < refused < 90_000
