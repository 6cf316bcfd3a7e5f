"""What the stock of an image shall hold, from what its templates are wanted for."""

import pytest

from etude.envserver.drivers.base import Warmth
from etude.envserver.drivers.vm.start import starter
from etude.envserver.drivers.vm.start.starter import Starter
from etude.envserver.drivers.vm.start.warm_pool_levels import FEWEST, Target

ONE_IMAGE = object.__new__(Starter)


def of_one_image(_template: str) -> Starter:
    return ONE_IMAGE


def wanted(*each: Warmth, max_shells: int) -> list[Target]:
    found = starter.targets(of_one_image, ["a", "b"], each, max_shells)
    return [target for _, target in found]


def test_templates_of_one_image_share_a_stock() -> None:
    some = Warmth(template="a", paused_clones=2, shells=3), Warmth(template="b", shells=1)
    assert wanted(*some, max_shells=64) == [Target(paused=2, shells=4, max_shells=4)]


@pytest.mark.parametrize(("allowed", "kept"), [(64, FEWEST), (1, 1), (0, 0)])
def test_a_few_shells_may_wait_for_saved_states_where_the_pool_allows_any(
    allowed: int, kept: int
) -> None:
    assert wanted(max_shells=allowed) == [Target(max_shells=kept)]
