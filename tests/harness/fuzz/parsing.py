"""Hostile frames at the parser of a node."""

from collections.abc import Iterable

from tests.harness.fuzz import mutator
from tests.harness.fuzz.counts import Counts
from tests.harness.fuzz.mutator import Mutator

from etude.envserver.guest import frames
from etude.envserver.guest.frames import BadFrameError, FrameParser

_ROUND = 200
_NONCE = bytes(range(16))


def run(seed: int, num_frames: int) -> Counts:
    """So many frames, some of them to a parser that waits for the answer to a RESET."""
    counts, number, recorded = Counts(), 0, mutator.from_guest()
    while counts.frames < num_frames:
        number += 1
        hostile = Mutator(seed=f"parser {seed} {number}", frames=recorded, wildness=0.3)
        pieces = [hostile.piece(40) for _ in range(_ROUND)]
        counts += fed(pieces, seeks=number % 5 == 0)
    return counts


def fed(pieces: Iterable[bytes], *, seeks: bool) -> Counts:
    """What parsers make of these; one that holds the half of something may get more of it."""
    counts, parser, said = Counts(), FrameParser(frames.FROM_GUEST), bytearray()
    for number, piece in enumerate(pieces):
        said += piece
        if seeks:
            parser.seek_ack(_NONCE)
        try:
            for frame in parser.feed(piece):
                counts.frames += 1
                assert len(frame.payload) <= frames.MAX_PAYLOAD, frame
                assert frame.kind in frames.FROM_GUEST, frame
            is_over = bool(number % 4)
            counts.frames += is_over and len(parser._held) > 0
        except BadFrameError:
            counts.frames += 1
            counts.refused += 1
            is_over = True
        except Exception as error:  # noqa: BLE001 - any other is what is looked for
            counts.crash(f"the parser raises {error!r}", bytes(said))
            is_over = True
        if len(parser._held) > frames.MAX_LENGTH + 4:
            counts.crash(f"the parser holds {len(parser._held)} bytes", bytes(said))
        if is_over:
            parser, said = FrameParser(frames.FROM_GUEST), bytearray()
    return counts
