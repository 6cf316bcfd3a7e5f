"""A version of several optimiser steps: when it is published, and how staleness counts it."""

from collections.abc import Callable
from typing import Any

import pytest

from etude.common import weights
from etude.common.weights.protocol.manifest import read_manifest

SFT_STEPS = 4
RL_STEPS = 6

MakeWorld = Callable[..., Any]


def every(steps: int, **fields: Any) -> dict[str, Any]:
    """Settings of a run that is never evaluated between its ends."""
    advanced = {"stepsPerVersion": steps, "retainVersions": 100}
    return {"weights": {"dtype": "Float32", "advanced": advanced}, "evaluation": [], **fields}


def published(world: Any) -> list[int]:
    """Steps of the versions that engines were told of, in the order of their numbers."""
    rows = sorted(world.rows("version"), key=lambda row: row["number"])
    return [row["global_step"] for row in rows]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, [4, 5, 6, 7, 8, 9, 10]), (2, [4, 6, 8, 10]), (4, [4, 8, 10]), (9, [4, 10])],
)
async def test_a_version_is_published_every_so_many_steps_and_at_the_end_of_the_phase(
    make_world: MakeWorld, steps: int, expected: list[int]
) -> None:
    world = make_world(**every(steps))
    assert await world.train()
    assert published(world) == expected
    chain = [read_manifest(world.store, v) for v in weights.accepted_chain(world.store)]
    assert [m.base for m in chain[1:]] == [m.ref for m in chain[:-1]]
    # Steps without a version say so: nothing was published, and the version stays the same.
    rows = [row for row in world.rows("step") if row["phase"] == "rl"]
    assert ["publish_seconds" in row for row in rows] == [
        row["global_step"] in expected for row in rows
    ]


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("steps", [2, 4])
async def test_staleness_counts_versions_over_crashes(
    make_world: MakeWorld, staleness: int, steps: int
) -> None:
    world = make_world(staleness=staleness, **every(steps))
    # Between two versions, and right after one.
    for after in (SFT_STEPS + 3, 1):
        await world.crash(after=after)
    assert await world.train()
    found = world.audit(max_staleness=staleness, steps_per_version=steps)
    assert found.findings == []
    assert found.trained == 36
    rows = [row for row in world.rows("step") if row["phase"] == "rl"]
    assert max(row["staleness_max"] for row in rows) <= staleness


async def test_synchronous_steps_of_one_version_train_what_it_sampled(
    make_world: MakeWorld,
) -> None:
    world = make_world(**every(3))
    assert await world.train()
    rows = [row for row in world.rows("step") if row["phase"] == "rl"]
    assert {row["staleness_max"] for row in rows} == {0}
    assert [row["policy_version"] for row in rows] == [1, 1, 1, 2, 2, 2]
    # Counted in steps, the last batch of a version is two behind.
    assert world.audit(max_staleness=1).findings
    assert world.audit(max_staleness=2).findings == []


async def test_what_is_evaluated_is_published_first(make_world: MakeWorld) -> None:
    settings = every(4)
    del settings["evaluation"]
    world = make_world(**settings)
    assert await world.train()
    assert [row["step"] for row in world.rows("eval")] == [0, 3, 6]
    assert published(world) == [SFT_STEPS, SFT_STEPS + 3, SFT_STEPS + 4, SFT_STEPS + RL_STEPS]
