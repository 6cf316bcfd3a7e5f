"""Supervised phases of the controller: positions in streamed data, and held-out losses."""

from collections.abc import Callable
from typing import Any

import pytest

SFT_STEPS = 4

MakeWorld = Callable[..., Any]


async def test_held_out_loss_is_measured_before_the_first_step_when_due_and_at_the_end(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.spec["phases"][0]["validation"] = {
        "data": [{"name": "held-out", "uri": "file:///held-out.jsonl"}],
        "everySteps": 3,
    }
    await world.train()
    rows = world.rows("held_out")
    assert [row["step"] for row in rows] == [0, 3, SFT_STEPS]
    assert [row["losses"] for row in rows] == [
        {"held-out": pytest.approx(1 / (1 + step), abs=1e-6)} for step in (0, 3, SFT_STEPS)
    ]


@pytest.mark.parametrize(("after", "resumed"), [(1, ""), (2, "sft 2"), (3, "sft 2")])
async def test_a_resumed_phase_reads_on_where_its_checkpoint_was(
    make_world: MakeWorld, after: int, resumed: str
) -> None:
    world = make_world()
    await world.crash(after=after)
    await world.train()
    assert world.runs[-1].learners.data_cursors[0] == resumed
