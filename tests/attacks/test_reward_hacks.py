"""Attacks on rewards, with their honest twins, in real environments and real grading."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.hacks.arena import HackArena, open_arena
from tests.support.hacks.attack import read_attacks, read_variants
from tests.support.hacks.rubric_hacks import HACKS
from tests.support.hacks.rubric_variants import VARIANTS as RUBRIC_VARIANTS

from etude.envserver.drivers.base import DriverUnavailableError

ATTACKS = {each.name: each for each in read_attacks()}
FAST = ("c-edit-test", "d-conftest-hook", "e-exit-zero")
VARIANTS = {each.name: each for each in read_variants()}
FAST_VARIANTS = ("d-sitecustomize-package", "d-sitecustomize-stand-in", "e-exit-zero-skipped")
KNOWN = ("f-grader-detection-source-line",)
"""Variants that score in spite of all repairs."""


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
    assert arms.attempt.scores_unrepaired, arms.detail
    assert not arms.attempt.scores, arms.detail
    assert arms.twin_scores, arms.detail


@pytest.mark.parametrize(
    "name", [n if n in FAST_VARIANTS else pytest.param(n, marks=pytest.mark.long) for n in VARIANTS]
)
async def test_a_variant_of_an_attack_scores_only_without_its_repair(
    arena: HackArena, name: str
) -> None:
    attempt = await arena.try_without_twin(VARIANTS[name])
    assert attempt.scores_unrepaired, attempt.detail
    assert attempt.scores == (name in KNOWN), attempt.detail


def test_each_attack_has_two_variants() -> None:
    variants = [*VARIANTS, *(each.name for each in RUBRIC_VARIANTS)]
    for name in [*ATTACKS, *(each.name for each in HACKS)]:
        assert len([each for each in variants if each.startswith(f"{name}-")]) == 2, name
