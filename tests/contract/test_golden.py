"""The golden run gives the same bytes wherever it is played.

What a stage leaves out is listed in the test's report (-rA). Where a tool's results were meant to
change, `python -m tests.harness.golden --write` writes the transcript anew; review the diff.
"""

import os
from pathlib import Path

import pytest
from tests.harness.golden.calls import ALL, Need
from tests.harness.golden.script import NUM_CALLS, TURNS
from tests.harness.golden.stages import STAGES
from tests.harness.golden.transcript import FILE, differences, left_out, paragraphs, play
from tests.harness.golden.tree import TREE

from etude.agent.toolsets import toolset
from etude.envserver.drivers.base import DriverUnavailableError

NEEDED = {
    "memory": {*ALL},
    "folder": {*ALL},
    "process": set[Need](),
    "reference-agent": {Need.WALL},
    "go-agent": {Need.WALL},
}
"""What calls need that are left out."""


@pytest.mark.parametrize("name", STAGES)
async def test_a_stage_gives_the_golden_results(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    try:
        async with STAGES[name](tmp_path) as stage:
            rows = await play(stage, TREE)
    except DriverUnavailableError as error:
        if os.environ.get("ETUDE_REQUIRE") == "sandbox":
            raise
        pytest.skip(str(error))
    request.node.add_report_section("call", "left out", "\n".join(left_out(rows)))
    assert not list(differences(rows, paragraphs(FILE.read_text())))
    assert {need for row in rows for need in row.missing} == NEEDED[name]


def test_the_transcript_has_every_call_and_every_tool() -> None:
    golden = paragraphs(FILE.read_text())
    assert len(golden) == NUM_CALLS >= 200
    assert "left out" not in FILE.read_text()
    used = {step.name for turn in TURNS for step in turn}
    assert set(toolset("Standard").tools) - used == {"finish"}


def test_turns_have_calls_beside_each_other() -> None:
    assert max(len(turn) for turn in TURNS) >= 10


def test_a_difference_shows_both_versions_of_the_call() -> None:
    golden = paragraphs(FILE.read_text())
    assert list(differences([], golden)) == [
        f"0 calls, and {len(golden)} in transcript.txt: write it again"
    ]
