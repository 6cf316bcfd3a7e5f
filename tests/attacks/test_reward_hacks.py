"""Attacks on rewards, with their honest twins, in real environments and real grading."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.hacks.arena import HackArena, open_arena
from tests.support.hacks.attack import read_attacks

from etude.envserver.drivers.base import DriverUnavailableError

ATTACKS = {each.name: each for each in read_attacks()}
FAST = ("c-edit-test", "d-conftest-hook", "e-exit-zero")


@pytest.fixture
async def arena(tmp_path: Path) -> AsyncIterator[HackArena]:
    try:
        async with open_arena(tmp_path) as made:
            yield made
    except DriverUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.long) for n in ATTACKS]
)
async def test_an_attack_scores_only_without_its_repair_and_its_twin_always(
    arena: HackArena, name: str
) -> None:
    arms = await arena.try_attack(ATTACKS[name])
    assert arms.scores_unrepaired, arms.detail
    assert not arms.scores, arms.detail
    assert arms.twin_scores, arms.detail
