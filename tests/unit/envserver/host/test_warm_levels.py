"""What nodes tell brokers of their readiness, and prepare for all of them together."""

from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.drivers.base import ALWAYS_READY, DriverReadiness, TemplateReadiness
from etude.envserver.host import warm_minimum
from etude.v1 import environments_pb2


def target(template: str, paused: int, shells: int = 0) -> environments_pb2.WarmTarget:
    return environments_pb2.WarmTarget(template=template, paused_clones=paused, shells=shells)


def test_what_several_brokers_want_is_added_up() -> None:
    orders = [[target("a", 1, 2), target("b", 3)], [target("a", 4)], []]
    wanted = warm_minimum.combined_targets(orders, ALWAYS_READY, {})
    assert wanted == [
        TemplateReadiness(template="a", paused_clones=5, shells=2),
        TemplateReadiness(template="b", paused_clones=3),
    ]


def test_a_heartbeat_says_what_is_ready_and_how_long_the_rest_takes() -> None:
    ready = TemplateReadiness(
        template="a",
        paused_clones=2,
        shells=1,
        spawn_cpu_ms=44.6,
        start_p50_ms=50.4,
        start_p90_ms=71.0,
        quarantined="crashes",
    )
    (level,) = warm_minimum.template_levels(DriverReadiness(templates=[ready]), {})
    assert (level.paused_clones, level.shells, level.resident) == (2, 1, True)
    assert (level.spawn_cpu_ms, level.start_p50_ms, level.start_p90_ms) == (45, 50, 71)
    assert level.quarantined == "crashes"


FEW = st.integers(min_value=0, max_value=20)


@given(FEW, FEW, FEW)
def test_what_is_ready_for_granted_leases_is_neither_dropped_nor_promised_again(
    held: int, asked: int, awaited: int
) -> None:
    readiness = DriverReadiness(templates=[TemplateReadiness(template="a", paused_clones=held)])
    kept = warm_minimum.combined_targets([[target("a", asked)]], readiness, {"a": awaited})
    (level,) = warm_minimum.template_levels(readiness, {"a": awaited})
    paused = sum(each.paused_clones for each in kept)
    assert paused >= min(held, awaited)
    assert paused - asked == held - level.paused_clones


def test_a_template_that_nobody_wants_and_nobody_awaits_is_not_kept() -> None:
    readiness = DriverReadiness(
        templates=[TemplateReadiness(template="a", paused_clones=3, shells=2)]
    )
    assert warm_minimum.combined_targets([[]], readiness, {}) == []
