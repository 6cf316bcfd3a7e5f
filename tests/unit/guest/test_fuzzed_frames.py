"""Some thousands of hostile frames, and every one that was ever too much; `make fuzz-frames` sends
a million."""

import asyncio
from pathlib import Path

import pytest
from tests.harness.fuzz import channels, mutator, parsing
from tests.harness.fuzz.counts import Counts
from tests.harness.fuzz.mutator import Mutator

from etude.envserver.guest.calls import OpenCall
from etude.envserver.guest.frames import Frame


def check(counts: Counts, num_frames: int) -> None:
    assert counts.frames >= num_frames
    assert counts.refused
    assert (counts.crashes, counts.hangs) == (0, 0), counts.findings


def test_a_parser_takes_or_refuses_whatever_comes() -> None:
    check(parsing.run(0, 5_000), 5_000)


def test_whoever_asks_a_hostile_guest_has_an_answer_or_an_error_of_ours() -> None:
    check(channels.run(0, 3_000), 3_000)


def test_what_was_once_too_much_no_longer_is() -> None:
    for path in sorted(mutator.CORPUS.glob("*.said")):
        said = path.read_bytes()
        parsed = parsing.fed([said], seeks=False)
        asked = asyncio.run(channels.Round([said]).play())
        assert (parsed.crashes, asked.crashes, asked.hangs) == (0, 0, 0), path.name


def test_the_same_seed_says_the_same() -> None:
    recorded = mutator.from_guest()
    said = [
        [Mutator(seed="s", frames=recorded, wildness=0.2).piece(9) for _ in range(20)]
        for _ in range(2)
    ]
    assert said[0] == said[1]


def test_what_breaks_is_found_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def trip(_call: OpenCall, frame: Frame) -> int:
        raise KeyError(frame.kind)

    monkeypatch.setattr(OpenCall, "take", trip)
    monkeypatch.setattr(channels, "PATIENCE_S", 1.0)
    counts = Counts(corpus=tmp_path)
    recorded = [frame for frame in mutator.from_guest() if frame.stream == 1]
    asyncio.run(channels.Round([recorded[0].encoded()], counts=counts).play())
    assert counts.crashes + counts.hangs > 0
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [recorded[0].encoded()]
