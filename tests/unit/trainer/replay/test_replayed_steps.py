"""Replay of recorded steps by a real learner: equal figures, or exactly what differs."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import pytest
import torch
from tests.support.trainer.one_learner import MODEL, OneLearner, run_controller

from etude.common.api.run.phases import Phase
from etude.common.api.run.spec import RLRunSpec
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.blobs import open_store
from etude.common.errors import UserError
from etude.common.run_folder.record import open_record
from etude.trainer.controller.phases import guards
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.replay.differences import StepVerdict
from etude.trainer.replay.history import read_history
from etude.trainer.replay.replayer import StepReplayer, copy_checkpoint

MakeWorld = Callable[..., Any]
STEPS = 5


@pytest.fixture(scope="module")
def world(make_world: MakeWorld, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of five steps on rewards with a checkpoint after every second one."""
    folder = tmp_path_factory.mktemp("run")
    spec = make_world().spec
    phase = spec["phases"][1] | {"maxSteps": STEPS, "optimizer": {"learningRate": "1e-2"}}
    spec |= {
        "model": {"uri": MODEL.as_uri()},
        "storage": {"uri": folder.as_uri()},
        "phases": [phase],
        "evaluation": [],
    }
    world = make_world(open_store(folder.as_uri()), given=spec)
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # The log-probs of simulated rollouts are of no policy.
        patch.setattr(guards, "MAX_MISMATCH", {"Float32": 100.0})
        patch.setattr(guards, "MAX_STALE_MISMATCH", 100.0)
        asyncio.run(run_controller(world))
    return world


async def replay(
    world: Any, work: Path, step: int, *, phases: Sequence[Phase] | None = None
) -> list[StepVerdict]:
    phases = phases or RLRunSpec.model_validate(world.spec).phases
    history = read_history(world.store, phases, step=step)
    found = history.checkpoint
    prefix = "" if found is None else copy_checkpoint(world.store, found, work)
    await asyncio.to_thread(work.mkdir, exist_ok=True)
    config = LearnerConfig(
        run="run",
        holder="replay",
        model_folder=MODEL,
        storage=Storage(uri=work.as_uri()),
        weights=Weights.model_validate(world.spec["weights"]),
    )
    replayer = StepReplayer(
        history=history,
        learners=OneLearner(config),
        record=open_record(world.store),
        prefix=prefix,
        source=world.store,
        states=open_store(work.as_uri()),
    )
    return [verdict async for verdict in replayer.replay()]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_replay_has_the_figures_of_the_journal_and_changes_nothing(
    world: Any, tmp_path: Path
) -> None:
    run = Path(url2pathname(urlparse(world.store.url).path))
    before = content(run)
    assert before
    later = await replay(world, tmp_path / "later", STEPS)
    digests = [row["weight_digest"] for row in world.rows("step")]
    assert later[-1].weight_digest == digests[-1]
    assert [each.differences for each in later] == [()] * len(later)
    assert later[0].global_step > 1, "it starts from a checkpoint"
    first = await replay(world, tmp_path / "first", 1)
    assert [each.differences for each in first] == [()], "no checkpoint: from the start weights"
    assert content(run) == before


async def test_a_replay_with_another_learning_rate_names_the_weights_alone(
    world: Any, tmp_path: Path
) -> None:
    (phase,) = RLRunSpec.model_validate(world.spec).phases
    optimizer = phase.optimizer.model_copy(update={"learning_rate": "2e-2"})
    changed = phase.model_copy(update={"optimizer": optimizer})
    (verdict,) = await replay(world, tmp_path / "work", 1, phases=[changed])
    (difference,) = verdict.differences
    assert difference.startswith("weight digest")


async def test_a_step_that_was_never_recorded_is_refused_with_the_newest_one(
    world: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"the newest is {STEPS}"):
        read_history(world.store, RLRunSpec.model_validate(world.spec).phases, step=99)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        read_history(open_store((tmp_path / "empty").as_uri()), (), step=1)
