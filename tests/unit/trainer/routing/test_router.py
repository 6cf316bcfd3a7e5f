"""A worker's router: siblings share a prompt, loads add up, and failed engines are avoided."""

from collections import Counter

from etude.trainer.routing.router import AVOID_S, Router, RoutingKey
from etude.trainer.routing.table import (
    EngineLoad,
    EngineState,
    Purpose,
    RoutingTable,
    RoutingUpdate,
    sum_loads,
)


def table(*targets: str, revision: int = 1) -> RoutingTable:
    engines = tuple((target, EngineState.LIVE) for target in targets)
    return RoutingTable(revision=revision, engines=engines)


def key(rollout: str, *, group: str = "g", call: int = 1, engine: str = "") -> RoutingKey:
    return RoutingKey(
        group_id=group,
        rollout_id=rollout,
        call=call,
        prompt_tokens=1_000,
        purpose=Purpose.TRAINING,
        engine=engine,
        engine_tokens=900 if engine else 0,
    )


def target_of(router: Router, wanted: RoutingKey) -> str:
    choice = router.choose(wanted)
    assert choice is not None
    return choice.target


def test_siblings_meet_where_their_prompt_is_cached() -> None:
    router = Router(table=table(*"abcd"))
    router.update(RoutingUpdate(router.table, dict.fromkeys("abcd", EngineLoad(50, 60_000))))
    first = target_of(router, key("g-0"))
    with router.track(first, key("g-0")):
        siblings = {target_of(router, key(f"g-{n}")) for n in range(1, 8)}
    assert siblings == {first}


def test_groups_spread_over_all_engines() -> None:
    router = Router(table=table(*"abcd"))
    counts: Counter[str] = Counter()
    for n in range(200):
        wanted = key(f"g{n}-0", group=f"g{n}")
        target = target_of(router, wanted)
        counts[target] += 1
        router.track(target, wanted).__enter__()
    assert max(counts.values()) <= 1.1 * 200 / 4


def test_a_later_turn_returns_to_the_engine_of_the_turn_before() -> None:
    router = Router(table=table(*"abcd"))
    for n in range(50):
        assert target_of(router, key(f"g-{n}", call=2, engine="c")) == "c"


def test_a_hot_engine_gives_its_rollouts_away() -> None:
    router = Router(table=table(*"ab"))
    router.update(
        RoutingUpdate(router.table, {"a": EngineLoad(60, 60_000), "b": EngineLoad(9, 900)})
    )
    assert target_of(router, key("g-0", call=2, engine="a")) == "b"


def test_loads_of_other_workers_count_and_are_not_reported_as_own() -> None:
    router = Router(table=table(*"ab"))
    with router.track("a", key("g-0")) as call:
        call.add_tokens(24)
        own = router.update(RoutingUpdate(router.table, {"b": EngineLoad(1, 5_000)}))
        assert own == {"a": EngineLoad(1, 1_024)}
        assert target_of(router, key("h-0", group="h")) == "a"
    assert router.own_loads() == {}
    assert sum_loads([own, own, {"b": EngineLoad(1, 1)}]) == {
        "a": EngineLoad(2, 2_048),
        "b": EngineLoad(1, 1),
    }


def test_an_older_table_changes_nothing() -> None:
    router = Router(table=table("a", revision=3))
    router.use_table(table("b", revision=2))
    assert target_of(router, key("g-0")) == "a"
    router.use_table(table("b", revision=4))
    assert target_of(router, key("g-0")) == "b"


def test_running_calls_leave_engines_that_drain_or_are_gone() -> None:
    states = (("a", EngineState.LIVE), ("b", EngineState.LAGGING), ("c", EngineState.DRAINING))
    router = Router(table=RoutingTable(revision=1, engines=states))
    assert [router.is_leaving(target) for target in "abcd"] == [False, False, True, True]


def test_a_failed_engine_is_avoided_for_a_while_and_is_the_last_resort() -> None:
    now = [0.0]
    router = Router(clock=lambda: now[0], table=table(*"ab"))
    router.note_failure("a")
    assert {target_of(router, key(f"g-{n}")) for n in range(20)} == {"b"}
    now[0] = 1.0
    router.note_failure("b")
    choice = router.choose(key("g-0"))
    assert choice is not None
    assert (choice.target, choice.is_suspect) == ("a", True)
    now[0] = AVOID_S
    choice = router.choose(key("g-0"))
    assert choice is not None
    assert (choice.target, choice.is_suspect) == ("a", False)


def test_without_an_engine_there_is_no_choice() -> None:
    assert Router().choose(key("g-0")) is None
