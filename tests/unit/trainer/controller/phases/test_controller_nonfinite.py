"""A run whose new weights are no numbers: failed for good, with all that was good before kept."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from tests.support.trainer.store_outages import replace_learners
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.cli.weights.verification import verify
from etude.common import weights
from etude.common.checkpoints import manifest
from etude.common.weights import VersionId
from etude.common.weights.protocol.listing import take_listing
from etude.trainer.controller import lifecycle
from etude.trainer.controller.checkpoints.recovery import OpenedRun
from etude.trainer.controller.inputs import Inputs
from etude.trainer.export.receipts import NonFiniteWeightsError, PublishBase, RankReceipt
from etude.v1 import run_pb2

MakeWorld = Callable[..., Any]

BAD = VersionId(1, 3)


@dataclass(slots=True)
class DivergingLearners(SimulatedLearners):
    """Whose weights are no numbers when they are to become a version."""

    @override
    async def encode(self, version: VersionId, base: PublishBase | None) -> list[RankReceipt]:
        if version == BAD:
            raise NonFiniteWeightsError(f"version {version} is not published: 7 weights are NaN")
        return await SimulatedLearners.encode(self, version, base)


async def test_it_ends_failed_and_is_not_started_again_and_its_last_checkpoint_is_good(
    make_world: MakeWorld, uninterrupted: str, tmp_path: Any
) -> None:
    world = make_world()
    run, sets, checkpoint = world.start()
    replace_learners(run, DivergingLearners(world.store))
    inputs = cast("Inputs", SimpleNamespace(task_sets=sets))
    code = await lifecycle._train(
        run, inputs, cast("OpenedRun", SimpleNamespace(checkpoint=checkpoint))
    )
    assert code == 0, "an exit code would have it started again, only to fail again"
    status = run.reporter.status
    assert status.state == run_pb2.RUN_STATE_FAILED
    assert (status.reason, status.policy_version) == ("NonFiniteWeights", BAD.number - 1)
    assert "7 weights are NaN" in status.message

    assert weights.accepted_chain(world.store)[-1] == VersionId(1, BAD.number - 1)
    assert BAD not in take_listing(world.store).payloads
    assert [v for v in verify(world.store, tmp_path) if v.problem] == []
    problems: list[str] = []
    found = manifest.first_intact(
        world.store, manifest.list_checkpoints(world.store)[::-1], run="run", problems=problems
    )
    assert found is not None
    assert found.manifest.step < run.progress.cursor.global_step, (
        "none is of the weights that are bad"
    )
    # Whoever takes the cause away goes on from there.
    assert await world.train()
    assert world.digest == uninterrupted
