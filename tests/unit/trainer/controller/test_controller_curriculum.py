"""A run with a curriculum: killed anywhere, it trains the same tasks in the same order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.installed_package import install_package

from etude.trainer.controller.admission.task_choice import CurriculumError
from etude.trainer.controller.run import root_cause

MakeWorld = Callable[..., Any]


SAME_TASK = """
from etude.common.api.meta import Model
from etude.trainer.curricula.base import Curriculum

class Parameters(Model):
    pass

def order(view, parameters):
    return [task.task.task_id for task in view.trained]

SAME = Curriculum(parameters=Parameters, order=order)
"""


def with_curriculum(make_world: MakeWorld, chosen: Any = None) -> Any:
    world = make_world()
    phase = next(p for p in world.spec["phases"] if p["type"] == "ReinforcementLearning")
    phase["curriculum"] = chosen or {"name": "SolveRateBand", "parameters": {"target": "0.4"}}
    return world


@pytest.mark.parametrize("after", [3, 5, 7])
async def test_a_killed_run_goes_on_in_the_order_of_its_curriculum(
    make_world: MakeWorld, uninterrupted: str, after: int
) -> None:
    whole = with_curriculum(make_world)
    assert await whole.train()
    assert whole.digest != uninterrupted
    killed = with_curriculum(make_world)
    await killed.crash(after=after)
    assert await killed.train()
    assert killed.digest == whole.digest
    ledger = killed.runs[-1].book.ledger
    assert list(ledger.consumed) == list(whole.runs[-1].book.ledger.consumed)
    assert killed.audit(max_staleness=0).findings == []


async def test_a_curriculum_that_names_a_trained_task_stops_the_run_with_its_field(
    make_world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"etude.curricula": {"acme.Same": "acme_same:SAME"}}
    install_package(tmp_path, monkeypatch, name="acme_same", source=SAME_TASK, entries=entries)
    world = with_curriculum(make_world, {"name": "acme.Same"})
    with pytest.raises(ExceptionGroup) as caught:
        await world.train()
    error = root_cause(caught.value)
    assert isinstance(error, CurriculumError)
    assert str(error).startswith("spec.phases[1].curriculum: the curriculum names task 'train/t")
    assert "trained already" in str(error)
