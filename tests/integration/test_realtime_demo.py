"""The real-time demo, small: feedback of users trains the version that serves them next."""

import asyncio
from pathlib import Path

import pytest

from etude.demo.generate import Sizes
from etude.demo.realtime.first_act import FirstAct, play_first_act
from etude.demo.realtime.inputs import write_inputs
from etude.demo.realtime.stage import StageSettings, open_stage
from etude.demo.realtime.warm_up import WarmPolicy

USERS = 24
DEADLINE_S = 900
"""Six times what it took on two idle cores."""


@pytest.mark.long
async def test_a_window_of_feedback_becomes_the_version_that_is_served(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    sizes = Sizes(train=4 * USERS, held_out=1, traces=200, repositories=1)
    await asyncio.to_thread(write_inputs, inputs, seed=0, sizes=sizes)
    # Without weights: a policy that says anything at all displeases most users.
    tasks = inputs / "tasks"
    policy = WarmPolicy(inputs / "model", tasks / "train", tasks / "held-out")
    folder = tmp_path / "demo"
    folder.mkdir()
    settings = StageSettings(folder=folder, num_users=USERS, num_rounds=1, horizon_s=2)
    lines: list[str] = []

    async def play() -> FirstAct:
        async with open_stage(settings, policy) as stage:
            act = await play_first_act(stage, lines.append)
            assert str(stage.served) == "1.0", "the last version was rolled back"
            return act

    act = await asyncio.wait_for(play(), DEADLINE_S)
    assert act.num_windows == 2
    assert any("version 1.2 is served" in line for line in lines)
    assert [each for each in act.checks if each.promise != "-" and not each.is_held] == []
    assert {each.promise for each in act.checks} >= {"P1", "P2", "P5"}
    assert act.num_events > USERS
