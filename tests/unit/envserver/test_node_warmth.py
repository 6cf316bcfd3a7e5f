"""What nodes tell brokers of their readiness, and prepare for all of them together."""

from etude.envserver.drivers.base import Readiness, Warmth
from etude.envserver.node import warmth
from etude.v1 import environments_pb2


def target(template: str, paused: int, shells: int = 0) -> environments_pb2.WarmTarget:
    return environments_pb2.WarmTarget(template=template, paused_clones=paused, shells=shells)


def test_what_several_brokers_want_is_added_up() -> None:
    wanted = warmth.wanted([[target("a", 1, 2), target("b", 3)], [target("a", 4)], []])
    assert wanted == [
        Warmth(template="a", paused_clones=5, shells=2),
        Warmth(template="b", paused_clones=3),
    ]


def test_a_heartbeat_says_what_is_ready_and_how_long_the_rest_takes() -> None:
    ready = Warmth(
        template="a",
        paused_clones=2,
        shells=1,
        spawn_cpu_ms=44.6,
        start_p50_ms=50.4,
        start_p90_ms=71.0,
        quarantined="crashes",
    )
    (level,) = warmth.levels(Readiness(templates=[ready]))
    assert (level.paused_clones, level.shells, level.resident) == (2, 1, True)
    assert (level.spawn_cpu_ms, level.start_p50_ms, level.start_p90_ms) == (45, 50, 71)
    assert level.quarantined == "crashes"
