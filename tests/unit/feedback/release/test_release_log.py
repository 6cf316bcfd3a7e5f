"""Stored releases: killed at any write, decided by two services, asked twice."""

import contextlib
import json
from collections.abc import Sequence

import pytest
from blake3 import blake3
from tests.support.feedback.failing_store import KilledError, KilledStore, KillPoint
from tests.support.feedback.releases import RULES, gate, look, of_state, version
from typing_extensions import override

from etude.common.blobs import MemoryStore, ObjectInfo
from etude.common.errors import FencedError, ReusedIdError, StoreError
from etude.common.release.channels import CANARY, STABLE, ChannelRecord, append_record, read_record
from etude.feedback.release.evidence import (
    CanaryLook,
    FreezeRequest,
    PromoteRequest,
    ProposeRequest,
    Request,
    RollbackRequest,
)
from etude.feedback.release.release_log import ReleaseLog

FIRST = PromoteRequest(caller="alice", version=version(40), without_gate=True)
PROPOSE = ProposeRequest(caller="operator", candidate=version(41), gate=gate(40))
STEP_MS = 1_000_000
STEPS: Sequence[Request | CanaryLook] = (
    FIRST,
    PROPOSE,
    look(800),
    look(2_000, kept=(0.6, 0.66)),
    RollbackRequest(caller="alice"),
)
STABLE_VERSIONS = [40, 41, 40]
CANARY_SHARES = [1_000, 2_500, None]


def perform(releases: ReleaseLog, number: int) -> None:
    step, now_ms = STEPS[number], (number + 1) * STEP_MS
    if isinstance(step, CanaryLook):
        evidence = of_state(step, releases.state)
        assert isinstance(evidence, CanaryLook)
        releases.observe(evidence, now_ms=now_ms)
    else:
        releases.answer(f"request-{number}", step, now_ms=now_ms)


def channel(store: MemoryStore, name: str) -> list[ChannelRecord]:
    keys = [key for key in store.objects if key.startswith(f"channels/{name}/")]
    return [read_record(store, name, number + 1) for number in range(len(keys))]


def check_end(store: MemoryStore) -> None:
    """All channels have each decision once, in order, with evidence that is there."""
    stable, canary = channel(store, STABLE), channel(store, CANARY)
    assert [each.served and each.served.number for each in stable] == STABLE_VERSIONS
    shares = [each.experiment and each.experiment.share for each in canary]
    assert shares == CANARY_SHARES
    assert len({each.experiment.salt for each in canary if each.experiment}) == 1
    for each in (*stable, *canary):
        data = store.objects[f"evidence/{each.evidence}.json"]
        assert blake3(data).hexdigest() == each.evidence
        assert json.loads(data)["sentence"] == each.sentence


def test_decisions_reach_the_channels() -> None:
    store = MemoryStore()
    releases = ReleaseLog.open(store, RULES)
    for number in range(len(STEPS)):
        perform(releases, number)
    check_end(store)
    reopened = ReleaseLog.open(store, RULES)
    assert reopened.state == releases.state
    actions = [each.action for each in reopened.read_newest(10)]
    assert actions == ["Rollback", "Promote", "GrowCanary", "StartCanary", "Promote"]


@pytest.mark.parametrize("takes_effect", [False, True])
def test_a_kill_at_any_write_repeats_the_same_decision(*, takes_effect: bool) -> None:
    num_kills = 0
    while True:
        point = KillPoint(at=num_kills + 1, takes_effect=takes_effect)
        store = KilledStore(point=point)
        number = 0
        with contextlib.suppress(KilledError):
            releases = ReleaseLog.open(store, RULES)
            while number < len(STEPS):
                perform(releases, number)
                number += 1
        if not point.is_dead:
            break
        num_kills += 1
        left = MemoryStore()
        left.objects.update(store.objects)
        successor = ReleaseLog.open(left, RULES)
        # The step that was cut is asked for again, as clients do and as the loop looks again.
        for again in range(number, len(STEPS)):
            perform(successor, again)
        check_end(left)
    assert num_kills >= 16  # evidence, decision and one or two channels of five steps


class LostReplies(MemoryStore):
    """Carries out one create, and answers neither that it did nor what is there."""

    def __init__(self, lost: int) -> None:
        super().__init__()
        self.lost = lost
        self.num_creates = 0
        self.is_silent = False

    @override
    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        self.num_creates += 1
        if self.num_creates == self.lost:
            self.is_silent = True
            raise StoreError("no answer")

    @override
    def head(self, key: str) -> ObjectInfo | None:
        if self.is_silent:
            self.is_silent = False
            raise StoreError("no answer")
        return super().head(key)


def test_a_service_takes_over_its_own_decision_of_which_the_replies_were_lost() -> None:
    lost = 0
    while True:
        lost += 1
        store = LostReplies(lost)
        releases = ReleaseLog.open(store, RULES)
        for number in range(len(STEPS)):
            try:
                perform(releases, number)
            except StoreError:
                releases.check_alone()
                perform(releases, number)
        check_end(store)
        if store.num_creates < lost:
            break
    assert lost > 16


def test_of_two_services_one_decides_and_the_other_stops() -> None:
    store = MemoryStore()
    first, second = ReleaseLog.open(store, RULES), ReleaseLog.open(store, RULES)
    first.answer("1", FIRST, now_ms=STEP_MS)
    with pytest.raises(FencedError, match="decision 1 of this route is another service's"):
        second.answer("2", replace_version(FIRST, 50), now_ms=STEP_MS)
    assert [each.served for each in channel(store, STABLE)] == [version(40)]


def replace_version(request: PromoteRequest, number: int) -> PromoteRequest:
    return request.model_copy(update={"version": version(number)})


def test_a_request_is_answered_once_also_by_a_successor() -> None:
    store = MemoryStore()
    releases = ReleaseLog.open(store, RULES)
    releases.answer("1", FIRST, now_ms=STEP_MS)
    refused = releases.answer("2", RollbackRequest(caller="alice"), now_ms=2 * STEP_MS)
    assert refused.action == "Refuse"
    releases.answer("3", replace_version(FIRST, 50), now_ms=3 * STEP_MS)
    # Decided now, it would roll back.
    for each in (releases, ReleaseLog.open(store, RULES)):
        again = each.answer("2", RollbackRequest(caller="alice"), now_ms=4 * STEP_MS)
        assert again == refused
        with pytest.raises(ReusedIdError, match="request 2 had other content"):
            each.answer("2", RollbackRequest(caller="bob"), now_ms=4 * STEP_MS)
    assert len(releases.read_newest(10)) == 3


def test_a_look_that_changes_nothing_writes_nothing() -> None:
    store = MemoryStore()
    releases = ReleaseLog.open(store, RULES)
    for number in range(2):
        perform(releases, number)
    few = of_state(look(150), releases.state)
    size = len(store.objects)
    releases.observe(few, now_ms=3 * STEP_MS)
    assert len(store.objects) == size


def test_a_channel_that_was_changed_by_hand_counts_as_it_is() -> None:
    store = MemoryStore()
    releases = ReleaseLog.open(store, RULES)
    for number in range(2):
        perform(releases, number)
    by_hand = channel(store, STABLE)[0].model_copy(update={"number": 2, "served": version(39)})
    append_record(store, by_hand)
    found = ReleaseLog.open(store, RULES)
    assert (found.state.stable, found.state.previous) == (version(39), version(40))
    assert found.state.canary is None
    assert found.read_newest(1)[0].sentence == "1.39 is in use by record 2 of the stable channel"
    assert channel(store, CANARY)[-1].served is None
    found.answer("next", replace_version(FIRST, 50), now_ms=9 * STEP_MS)
    assert [each.number for each in channel(store, STABLE)] == [1, 2, 3]


def test_a_record_by_hand_in_the_place_of_one_that_was_not_appended_counts() -> None:
    store = MemoryStore()
    releases = ReleaseLog.open(store, RULES)
    for number in range(2):
        perform(releases, number)
    perform(releases, 4)
    store.objects.pop("channels/canary/000000000002.json")
    append_record(store, channel(store, CANARY)[0].model_copy(update={"number": 2}))
    found = ReleaseLog.open(store, RULES)
    found.answer("next", FreezeRequest(caller="alice"), now_ms=9 * STEP_MS)
    assert [each.served for each in channel(store, CANARY)] == [version(41), version(41), None]


def test_decisions_follow_each_other_also_where_the_clock_was_set_back() -> None:
    releases = ReleaseLog.open(MemoryStore(), RULES)
    first = releases.answer("1", FIRST, now_ms=2 * STEP_MS)
    second = releases.answer("2", PROPOSE, now_ms=STEP_MS)
    assert second.decided_ms == first.decided_ms + 1


def test_looks_are_stored_for_the_next_service() -> None:
    store = MemoryStore()
    releases = ReleaseLog.open(store, RULES)
    for number in range(3):
        perform(releases, number)
    reopened = ReleaseLog.open(store, RULES)
    assert reopened.state.canary is not None
    assert reopened.state.canary.looks == (0.4,)
