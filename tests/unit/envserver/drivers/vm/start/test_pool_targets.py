"""What the stock of an image shall hold, from what its templates are wanted for."""

import pytest

from etude.envserver.drivers.base import TemplateReadiness
from etude.envserver.drivers.vm.start import starter
from etude.envserver.drivers.vm.start.starter import VmStarter
from etude.envserver.drivers.vm.start.warm_pool_levels import FEWEST, WarmPoolTarget

ONE_IMAGE = object.__new__(VmStarter)


def of_one_image(_template: str) -> VmStarter:
    return ONE_IMAGE


def wanted(*each: TemplateReadiness, max_shells: int) -> list[WarmPoolTarget]:
    found = starter.pool_targets(of_one_image, ["a", "b"], each, max_shells)
    return [target for _, target in found]


def test_templates_of_one_image_share_a_stock() -> None:
    some = (
        TemplateReadiness(template="a", paused_clones=2, shells=3),
        TemplateReadiness(template="b", shells=1),
    )
    assert wanted(*some, max_shells=64) == [WarmPoolTarget(paused=2, shells=4, max_shells=4)]


@pytest.mark.parametrize(("allowed", "kept"), [(64, FEWEST), (1, 1), (0, 0)])
def test_a_few_shells_may_wait_for_saved_states_where_the_pool_allows_any(
    allowed: int, kept: int
) -> None:
    assert wanted(max_shells=allowed) == [WarmPoolTarget(max_shells=kept)]
