"""Where an environment goes: against a look at every node."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.envserver.broker.hosts import CLONE_BYTES, HostState
from etude.envserver.broker.placement import (
    CHOICES,
    PlacementRequest,
    best_host,
    choose_host,
    expected_ms,
)
from etude.envserver.broker.start_costs import TemplateReadiness

levels = st.builds(
    TemplateReadiness,
    paused_clones=st.integers(0, 2),
    shells=st.integers(0, 2),
    resident=st.booleans(),
    quarantined=st.sampled_from(["", "", "", "it crashed five times"]),
)
nodes = st.lists(
    st.builds(
        HostState,
        node_id=st.uuids().map(str),
        slots=st.integers(0, 6),
        opening=st.integers(0, 3),
        draining=st.booleans(),
        is_suspect=st.booleans(),
        queue_ms=st.floats(0, 500),
        memory_bytes=st.one_of(st.none(), st.integers(0, 4 * CLONE_BYTES)),
        readiness_by_template=st.fixed_dictionaries({"python": levels}),
    ),
    max_size=40,
)


def eligible(found: list[HostState]) -> list[HostState]:
    """By hand, apart from the code under test."""
    return [
        n
        for n in found
        if not (n.draining or n.is_suspect or n.readiness_by_template["python"].quarantined)
        and n.slots - n.opening > 0
        and (n.memory_bytes is None or n.memory_bytes >= CLONE_BYTES)
    ]


@settings(deadline=None)  # neighbours may hold both cores
@given(nodes)
def test_when_every_host_is_looked_at_the_soonest_eligible_one_wins(found: list[HostState]) -> None:
    soonest = min((expected_ms(n, "python") for n in eligible(found)), default=None)

    picked = choose_host(found, PlacementRequest("python"), Random(0), choices=len(found) + 1)

    assert (None if picked is None else expected_ms(picked, "python")) == soonest


@settings(deadline=None)  # neighbours may hold both cores
@given(nodes, st.integers())
def test_a_few_random_hosts_are_eligible_and_found_whenever_there_are_any(
    found: list[HostState], seed: int
) -> None:
    picked = choose_host(found, PlacementRequest("python"), Random(seed))

    assert (picked is not None) == bool(eligible(found))
    assert picked is None or any(picked is node for node in eligible(found))


@settings(deadline=None)  # neighbours may hold both cores
@given(nodes, st.integers(2, 5), st.integers())
def test_siblings_go_where_all_of_them_fit_if_that_is_anywhere(
    found: list[HostState], siblings: int, seed: int
) -> None:
    roomy = [
        n
        for n in eligible(found)
        if n.slots - n.opening >= siblings
        and (n.memory_bytes is None or n.memory_bytes >= siblings * CLONE_BYTES)
    ]

    picked = choose_host(found, PlacementRequest("python", siblings), Random(seed))

    assert (picked is not None) == bool(eligible(found))
    assert not roomy or any(picked is node for node in roomy)


def test_the_best_of_four_is_never_worse_than_the_fourth_best_of_most() -> None:
    found = [
        HostState(
            node_id=str(n),
            slots=1,
            queue_ms=float(n),
            readiness_by_template={"python": TemplateReadiness()},
        )
        for n in range(100)
    ]
    draws = [choose_host(found, PlacementRequest("python"), Random(seed)) for seed in range(2_000)]

    # The least of four draws out of 100 lies in the lower half in 15 of 16 cases.
    lower = sum(node is not None and node.queue_ms < 50 for node in draws) / len(draws)
    assert lower == pytest.approx(1 - 0.5**CHOICES, abs=0.02)


def test_what_a_host_has_ready_decides_between_idle_hosts() -> None:
    bare, shell, clone, away = (
        HostState(node_id=name, slots=9, readiness_by_template={"python": level})
        for name, level in {
            "bare": TemplateReadiness(),
            "shell": TemplateReadiness(shells=1),
            "clone": TemplateReadiness(paused_clones=1),
            "away": TemplateReadiness(resident=False),
        }.items()
    )
    order = [clone, shell, bare, away]

    for place, node in enumerate(order):
        assert best_host(reversed(order[place:]), PlacementRequest("python")) is node


def test_a_reservation_uses_up_what_is_ready_and_makes_the_host_slower() -> None:
    node = HostState(
        node_id="n",
        slots=4,
        memory_bytes=2 * CLONE_BYTES,
        readiness_by_template={"python": TemplateReadiness(paused_clones=1)},
    )
    before = expected_ms(node, "python")

    node.reserve("python")
    assert node.free == 3
    assert not node.readiness_by_template["python"].paused_clones
    assert expected_ms(node, "python") > before

    node.reserve("python")
    assert not node.takes("python")
