"""What a pool has its nodes keep ready, whatever brokers want."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from etude.common.api.pool.spec import EnvPoolSpec
from etude.envserver.drivers.base import DriverReadiness, DriverUnavailableError, TemplateReadiness
from etude.envserver.drivers.in_memory import MemoryDriver
from etude.envserver.host import warm_minimum
from etude.envserver.host.warm_minimum import WarmMinimum, read_minimum
from etude.v1 import environments_pb2

FEW = st.integers(min_value=0, max_value=20)


class Preparing(MemoryDriver):
    """Says that it could have something ready."""

    @override
    def readiness(self) -> DriverReadiness:
        return DriverReadiness(templates=[TemplateReadiness(template="python")])


def spec(**fields: object) -> EnvPoolSpec:
    templates = [{"name": "python", "warmPerReplica": 3}, {"name": "other"}]
    return EnvPoolSpec.model_validate({"templates": templates, **fields})


def test_the_bounds_are_those_of_the_pool(tmp_path: Path) -> None:
    found = read_minimum(
        spec(warm={"shellsPerReplica": 2, "maxShellsPerReplica": 8}), Preparing(tmp_path)
    )
    assert found == WarmMinimum({"python": 3}, 2, 8)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "spec.templates"),
        ({"templates": [{"name": "python"}], "warm": {"shellsPerReplica": 1}}, "spec.warm"),
        ({"templates": [{"name": "python"}], "warm": {"maxShellsPerReplica": 1}}, "spec.warm"),
    ],
)
def test_a_driver_that_prepares_nothing_refuses_to_be_asked(
    tmp_path: Path, fields: dict[str, object], named: str
) -> None:
    with pytest.raises(DriverUnavailableError, match=named):
        read_minimum(spec(**fields), MemoryDriver(tmp_path))
    plain = EnvPoolSpec.model_validate({"templates": [{"name": "python"}]})
    assert read_minimum(plain, MemoryDriver(tmp_path)) == WarmMinimum({})


def test_more_shells_than_their_limit_are_refused() -> None:
    with pytest.raises(ValueError, match="at most maxShellsPerReplica"):
        spec(warm={"shellsPerReplica": 9, "maxShellsPerReplica": 8})


@given(FEW, FEW, FEW, FEW, FEW)
def test_bounds_hold_whatever_brokers_want(
    asked: int, shells: int, paused: int, fewest: int, more: int
) -> None:
    order = environments_pb2.WarmTarget(template="a", paused_clones=asked, shells=shells)
    bounds = WarmMinimum({"a": paused}, fewest, fewest + more)
    readiness = DriverReadiness(
        templates=[TemplateReadiness(template="a"), TemplateReadiness(template="b")]
    )
    found = {
        each.template: each
        for each in warm_minimum.combined_targets([[order]], readiness, {}, bounds)
    }
    a, b = (found.get(name, TemplateReadiness(template=name)) for name in ("a", "b"))
    assert a.paused_clones == max(asked, paused)
    assert a.shells == min(max(shells, fewest), fewest + more)
    assert (b.paused_clones, b.shells) == (0, fewest)
