"""The audit of windows: nothing to report of an honest route, and each kind of damage by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.feedback import events as examples
from tests.support.feedback.lives import NOW_MS, SECRET, SERVER, Stores, living
from tests.support.feedback.turns import serve_version, turn, write_turns

from etude.common.blobs import MemoryStore
from etude.common.feedback import windows
from etude.common.feedback.windows import WindowExclusion, WindowManifest
from etude.common.turns import turn_log
from etude.feedback.ledger.ledger import open_ledger
from etude.feedback.windows.audit import audit_windows
from etude.feedback.windows.builder import WindowBuilder
from etude.feedback.windows.settings import WindowRules

RULES = WindowRules(num_rollouts=4, min_rollouts=2, max_age_s=500, horizon_s=100)
CLOCKS_MS = 300_000
USERS = ("a", "b", "c", "d", "e", "f", "g", "h", "i")


@dataclass
class Route:
    """A route with two windows, one rollout that waits, and one that is masked."""

    store: MemoryStore
    keys: MemoryStore

    def manifest(self, number: int) -> WindowManifest:
        return windows.read_window(self.store, number)

    def change(self, number: int, **changes: Any) -> None:
        """Write a manifest with other fields, whoever would do so."""
        fields = self.manifest(number).model_dump() | changes
        self.store.delete([windows.window_key(number)])
        windows.create_window(self.store, WindowManifest.model_validate(fields))

    def change_rollout(self, **changes: Any) -> None:
        """Change the first rollout of the first window."""
        first, *others = self.manifest(1).rollouts
        changed = first.model_copy(update=changes)
        self.change(1, rollouts=(changed, *others))

    def object_key(self) -> str:
        first = self.manifest(1).rollouts[0]
        return windows.rollout_key(first.tenant, first.user, first.rollout)

    def invariants(self) -> set[str]:
        audit = audit_windows(self.store, SECRET, RULES, uid="test")
        return {finding.invariant for finding in audit.findings}


@pytest.fixture
async def route() -> Route:
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for number, user in enumerate(USERS):
            events = [
                examples.encoded("edit_applied", id=f"{user}1", user=user),
                examples.encoded(
                    "edit_observed", id=f"{user}2", user=user, ageS=101, numAliveLines=number % 3
                ),
            ]
            await intake.take(events, SERVER)
    users = (*USERS, "unknown")
    write_turns(stores.ledger, [turn(user, started_ms=NOW_MS) for user in users])
    ledger = open_ledger(stores.ledger, stores.keys, SECRET, uid="test", holder="test")
    WindowBuilder(ledger, RULES, clock_ms=lambda: NOW_MS + 130_000).run_pass()
    return Route(stores.ledger, stores.keys)


def test_an_honest_route_has_no_findings(route: Route) -> None:
    audit = audit_windows(route.store, SECRET, RULES, uid="test")
    assert audit.findings == []
    assert (audit.num_windows, audit.num_served, audit.num_trained) == (2, 10, 8)
    assert (audit.num_waiting, audit.masked) == (1, {"NoConsent": 1})
    assert any(each.advantage for each in route.manifest(1).rollouts)


def exclude_trained(route: Route) -> None:
    trained = route.manifest(1).rollouts[0].rollout
    exclusion = WindowExclusion(rollout=trained, reason="NoConsent")
    route.change(2, exclusions=(exclusion,))


def damage_manifest(route: Route) -> None:
    key = windows.window_key(1)
    route.store.put(key, route.store.get(key).replace(b"run-1", b"run-2"))


def take_other_version(route: Route) -> None:
    route.change(1, version=2)


DAMAGES: Mapping[str, tuple[Callable[[Route], object], str]] = {
    "a rollout in two windows": (
        lambda r: r.change(2, rollouts=r.manifest(1).rollouts),
        "once",
    ),
    "a rollout twice in a window": (
        lambda r: r.change(1, rollouts=r.manifest(1).rollouts * 2),
        "once",
    ),
    "a rollout that is trained and masked": (exclude_trained, "once"),
    "a rollout that was never served": (lambda r: r.change_rollout(rollout="0" * 32), "served"),
    "a rollout of another user": (lambda r: r.change_rollout(user="1" * 32), "served"),
    "a window that is gone": (lambda r: r.store.delete([windows.window_key(1)]), "manifest"),
    "a damaged manifest": (damage_manifest, "manifest"),
    "terms that no one agreed to": (lambda r: r.change_rollout(consent="2020-01"), "consent"),
    "a window before the consents": (lambda r: r.change(1, last_sequence=1), "consent"),
    "a window of the future": (lambda r: r.change(1, last_sequence=10**9), "consent"),
    "a version that sampled nothing": (take_other_version, "version"),
    "an object that is gone": (lambda r: r.store.delete([r.object_key()]), "object"),
    "another object": (lambda r: r.store.put(r.object_key(), b"other"), "object"),
    "a user above the cap": (lambda r: r.change_rollout(advantage=9.5), "cap"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_reported_by_the_invariant_that_it_breaks(route: Route, name: str) -> None:
    damage, invariant = DAMAGES[name]
    damage(route)
    assert invariant in route.invariants()


async def test_an_erased_users_object_is_reported_until_it_is_deleted(route: Route) -> None:
    digest = route.manifest(1).rollouts[0].user
    (user,) = (name for name in USERS if SECRET.user_id("acme", name).digest == digest)
    async with living(Stores(route.store, route.keys)) as intake:
        await intake.ledger.erase_user(SECRET.user_id("acme", user), now_ms=NOW_MS + 200_000)
        assert route.invariants() == {"erasure"}
        WindowBuilder(intake.ledger, RULES).run_pass()
        assert route.invariants() == set()


def test_turns_that_are_removed_are_no_damage_and_the_rest_is_still_compared(route: Route) -> None:
    first = route.manifest(1).opened_ms - RULES.settled_by_ms(0) - CLOCKS_MS
    (key,) = (info.key for info in route.store.list(turn_log.PREFIX))
    route.store.delete([key])
    assert route.invariants() == {"served"}
    route.store.create(f"{turn_log.REMOVED}{first:015d}", b"")  # windows began behind it
    assert route.invariants() == {"served"}
    route.store.create(f"{turn_log.REMOVED}{first + 1:015d}", b"")
    audit = audit_windows(route.store, SECRET, RULES, uid="test")
    assert audit.findings == []
    assert (audit.num_served, audit.num_trained, audit.num_removed) == (9, 8, 9)
    assert (audit.num_waiting, audit.masked.total()) == (0, 1)


def test_objects_of_windows_that_are_removed_with_their_turns_are_no_damage(route: Route) -> None:
    opened_ms = max(route.manifest(number).opened_ms for number in (1, 2))
    route.store.delete([info.key for info in route.store.list(windows.ROLLOUTS)])
    assert route.invariants() == {"object"}
    route.store.create(f"{turn_log.REMOVED}{opened_ms - CLOCKS_MS:015d}", b"")
    assert route.invariants() == {"object"}
    route.store.create(f"{turn_log.REMOVED}{opened_ms - CLOCKS_MS + 1:015d}", b"")
    assert route.invariants() == set()
