"""Windows from turns and events: every served rollout is trained once, waits, or has a reason."""

import asyncio
from dataclasses import dataclass, replace

import pytest
from tests.support.feedback.lives import NOW_MS, SECRET, Stores, living, send
from tests.support.feedback.turns import serve_version, turn, write_turns
from typing_extensions import override

from etude.common.blobs import MemoryStore
from etude.common.errors import FencedError
from etude.common.feedback import windows
from etude.common.turns.turn_log import identify_rollout
from etude.common.turns.turn_sealing import TurnKey, TurnSealer, derive_public_key
from etude.common.weights import VersionId
from etude.feedback.ingest.intake import EventIntake
from etude.feedback.ledger.ledger import open_ledger
from etude.feedback.windows.audit import audit_windows
from etude.feedback.windows.builder import WindowBuilder
from etude.feedback.windows.settings import WindowRules


@dataclass(slots=True)
class CountingStore(MemoryStore):
    """Counts objects that are read."""

    num_reads: int = 0

    @override
    def get(self, key: str) -> bytes:
        self.num_reads += 1
        return MemoryStore.get(self, key)


HORIZON_S = 100.0
RULES = WindowRules(num_rollouts=4, min_rollouts=2, max_age_s=1_000, horizon_s=HORIZON_S)
SETTLED_MS = NOW_MS + 200_000
USERS = ("a", "b", "c", "d")


def build(intake: EventIntake, *, now_ms: int = SETTLED_MS) -> WindowBuilder:
    return WindowBuilder(intake.ledger, RULES, clock_ms=lambda: now_ms)


async def run(builder: WindowBuilder) -> None:
    await asyncio.to_thread(builder.run_pass)


async def test_turns_and_events_become_a_window() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in USERS:
            await send(intake, "edit_applied", user)
            alive = 2 if user in {"a", "b"} else 0
            await send(intake, "edit_observed", user, ageS=100.5, numAliveLines=alive)
        await send(intake, "followup", "d", text="no, undo that")
        write_turns(stores.ledger, [turn(user, started_ms=NOW_MS) for user in USERS])
        await run(build(intake))
        await run(build(intake))
    assert list(windows.list_windows(stores.ledger)) == [1]
    manifest = windows.read_window(stores.ledger, 1)
    assert (manifest.run_uid, manifest.epoch, manifest.version) == ("run-1", 1, 1)
    assert manifest.exclusions == ()
    advantages = {}
    for each in manifest.rollouts:
        key = windows.rollout_key(each.tenant, each.user, each.rollout)
        rollout = windows.decode_rollout(stores.ledger.get(key), digest=each.digest, where=key)
        assert rollout.rollout_id == each.rollout
        assert list(rollout.links[0].token_ids) == [1, 2, 3, 4, 5]
        assert rollout.links[0].loss_mask == b"\0\0\0\1\1"
        advantages[each.user] = each.advantage
    by_name = {user: advantages[SECRET.user_id("acme", user).digest] for user in USERS}
    assert by_name["a"] == by_name["b"] > 0 > by_name["c"] > by_name["d"]


async def test_sealed_turns_are_trained_until_the_key_of_their_user_is_destroyed() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        turns = []
        for user in (*USERS, "gone"):
            await send(intake, "shown", user)
            record = turn(user, started_ms=NOW_MS)
            key = await intake.ledger.user_key(SECRET.user_id("acme", user))
            public = derive_public_key(key.key)
            TurnSealer.make(TurnKey(key.user.digest, key.generation, public)).seal(record)
            turns.append(record)
        write_turns(stores.ledger, turns)
        # As an erasure does that the builder has not read yet.
        intake.ledger.keys.destroy(SECRET.user_id("acme", "gone"), 0)
        await run(build(intake))
    manifest = windows.read_window(stores.ledger, 1)
    assert {each.user for each in manifest.rollouts} <= {
        SECRET.user_id("acme", user).digest for user in USERS
    }
    (first, *_) = manifest.rollouts
    key_name = windows.rollout_key(first.tenant, first.user, first.rollout)
    rollout = windows.decode_rollout(
        stores.ledger.get(key_name), digest=first.digest, where=key_name
    )
    assert list(rollout.links[0].token_ids) == [1, 2, 3, 4, 5]
    assert SECRET.user_id("acme", "gone").digest not in {each.user for each in manifest.rollouts}


async def test_a_rollout_of_which_every_turn_is_withheld_is_masked_as_one_with_a_secret() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        turns = [turn(user, started_ms=NOW_MS) for user in (*USERS, "leak")]
        withheld = turn("leak", started_ms=NOW_MS, sampled=())
        withheld.ClearField("prompt_token_ids")
        withheld.spans[0].end = withheld.withheld.num_tokens = 2
        for user in (*USERS, "leak"):
            await send(intake, "shown", user)
        write_turns(stores.ledger, [*turns[:-1], withheld])
        await run(build(intake))
        await run(build(intake))
        audit = audit_windows(stores.ledger, SECRET, RULES, uid="test")
    assert (audit.num_served, audit.num_trained, audit.num_waiting) == (5, 4, 0)
    assert audit.masked == {"HoldsSecret": 1}
    assert audit.findings == []


async def test_rollouts_of_another_run_with_the_same_version_are_not_trained() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in (*USERS, "other", "both"):
            await send(intake, "shown", user)
        turns = [turn(user, started_ms=NOW_MS) for user in USERS[1:]]
        unnamed = turn(USERS[0], started_ms=NOW_MS, run_uid="")
        other = turn("other", started_ms=NOW_MS, run_uid="run-2")
        both = [
            turn("both", started_ms=NOW_MS),
            turn("both", started_ms=NOW_MS, prefix=5, run_uid="run-2"),
        ]
        write_turns(stores.ledger, [*turns, unnamed, other, *both])
        await run(build(intake))
        audit = audit_windows(stores.ledger, SECRET, RULES, uid="test")
    manifest = windows.read_window(stores.ledger, 1)
    assert {each.user for each in manifest.rollouts} == {
        SECRET.user_id("acme", user).digest for user in USERS
    }
    assert audit.masked == {"VersionNotServed": 1, "MixedVersions": 1}
    assert audit.findings == []


async def test_a_rollout_waits_for_its_horizon_and_an_old_window_closes_with_fewer() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in ("a", "b"):
            await send(intake, "shown", user)
        write_turns(stores.ledger, [turn(user, started_ms=NOW_MS) for user in ("a", "b")])
        await run(build(intake, now_ms=NOW_MS + 124_000))
        await run(build(intake, now_ms=NOW_MS + 1_124_000))
        assert not [*windows.list_windows(stores.ledger)]
        await run(build(intake, now_ms=NOW_MS + 1_125_000))
    assert len(windows.read_window(stores.ledger, 1).rollouts) == 2


async def test_users_who_do_not_agree_now_are_left_out_with_the_reason() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    users = (*USERS, "erased", "revoked", "unknown")
    async with living(stores) as intake:
        for user in users[:-1]:
            await send(intake, "shown", user)
        write_turns(stores.ledger, [turn(user, started_ms=NOW_MS - 5) for user in users])
        erased = SECRET.user_id("acme", "erased")
        await intake.ledger.erase_user(erased, now_ms=NOW_MS)
        later = "2026-11-01T09:00:00Z"
        assert await send(intake, "shown", "revoked", granted=False, decided=later) == 403
        await run(build(intake))
    manifest = windows.read_window(stores.ledger, 1)
    names = {identify_rollout("acme", user, "r-1"): user for user in users}
    assert {names[each.rollout] for each in manifest.rollouts} == set(USERS)
    assert {names[each.rollout]: each.reason for each in manifest.exclusions} == {
        "erased": "Erased",
        "revoked": "NoConsent",
        "unknown": "NoConsent",
    }


async def test_a_branch_of_a_tenant_trains_on_nobody_elses_rollouts() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in USERS:
            await send(intake, "shown", user)
        others = [turn(user, started_ms=NOW_MS, tenant="other") for user in USERS]
        write_turns(stores.ledger, [*others, *(turn(user, started_ms=NOW_MS) for user in USERS)])
        rules = replace(RULES, tenant="acme")
        await run(WindowBuilder(intake.ledger, rules, clock_ms=lambda: SETTLED_MS))
    manifest = windows.read_window(stores.ledger, 1)
    assert {each.tenant for each in manifest.rollouts} == {"acme"}
    assert {each.rollout: each.reason for each in manifest.exclusions} == {
        each.rollout_id: "OtherTenant" for each in others
    }
    audit = audit_windows(stores.ledger, SECRET, replace(RULES, tenant="acme"), uid="test")
    assert (audit.findings, audit.num_trained, audit.num_waiting) == ([], 4, 0)
    audit = audit_windows(stores.ledger, SECRET, replace(RULES, tenant="other"), uid="test")
    assert {finding.invariant for finding in audit.findings} == {"tenant"}


async def test_more_exclusions_than_a_window_lists_are_left_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(windows, "MAX_ROLLOUTS", 3)
    stores = Stores()
    serve_version(stores.ledger)
    unknown = [f"unknown-{number}" for number in range(5)]
    async with living(stores) as intake:
        for user in USERS:
            await send(intake, "shown", user)
        write_turns(stores.ledger, [turn(user, started_ms=NOW_MS) for user in (*USERS, *unknown)])
        builder = build(intake)
        await run(builder)
    assert len(windows.read_window(stores.ledger, 1).exclusions) == 3
    assert len(builder.waiting.histories) == 2


async def test_a_builder_whose_ledger_another_service_writes_ends_before_it_stores_anything() -> (
    None
):
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in USERS:
            await send(intake, "shown", user)
        write_turns(stores.ledger, [turn(user, started_ms=NOW_MS) for user in USERS])
        open_ledger(stores.ledger, stores.keys, SECRET, uid="test", holder="other")
        with pytest.raises(FencedError, match="another feedback service"):
            await run(build(intake))
    assert not [*stores.ledger.list(windows.ROLLOUTS)]
    assert not [*windows.list_windows(stores.ledger)]


async def test_rollouts_that_cannot_be_trained_are_masked_with_the_reason() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    serve_version(stores.ledger, VersionId(1, 2), number=2)
    cases = {
        "MixedVersions": [
            turn("mixed", started_ms=NOW_MS, branch=str(n), version=VersionId(1, n)) for n in (1, 2)
        ],
        "VersionNotServed": [turn("other", started_ms=NOW_MS, version=VersionId(1, 9))],
        "OnlySideTurns": [turn("side", started_ms=NOW_MS, is_side=True)],
        "IncompleteTurns": [turn("lost", started_ms=NOW_MS, prefix=4)],
        "MalformedTurns": [turn("bad", started_ms=NOW_MS, prompt=[])],
    }
    others = ("mixed", "other", "side", "lost", "bad")
    async with living(stores) as intake:
        for user in (*USERS, *others):
            await send(intake, "shown", user)
        turns = [turn(user, started_ms=NOW_MS, version=VersionId(1, 2)) for user in USERS]
        for record in (record for records in cases.values() for record in records):
            if record.user in {"lost", "bad"}:
                record.spans[0].sampled.number = 2
            turns.append(record)
        write_turns(stores.ledger, turns)
        builder = build(intake, now_ms=NOW_MS + 2_000_000)
        builder.rules = replace(RULES, num_rollouts=10)
        await run(builder)
    manifest = windows.read_window(stores.ledger, 1)
    assert (manifest.version, len(manifest.rollouts)) == (2, len(USERS))
    reasons = {each.rollout: each.reason for each in manifest.exclusions}
    assert reasons == {
        identify_rollout("acme", user, "r-1"): reason
        for user, reason in zip(others, cases, strict=True)
    }


async def test_a_damaged_object_of_turns_masks_its_rollouts_and_stops_nothing() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in (*USERS, "lost"):
            await send(intake, "shown", user)
        write_turns(stores.ledger, [turn("lost", started_ms=NOW_MS)], writer="w1")
        key = next(iter(stores.ledger.list("turns/"))).key
        stores.ledger.put(key, b"damaged")
        second = turn("lost", started_ms=NOW_MS, prefix=5, prompt=[6])
        write_turns(stores.ledger, [second, *(turn(u, started_ms=NOW_MS) for u in USERS)], "w2")
        await run(build(intake, now_ms=NOW_MS + 2_000_000))
    manifest = windows.read_window(stores.ledger, 1)
    assert [each.reason for each in manifest.exclusions] == ["IncompleteTurns"]


async def test_rollouts_of_a_version_that_is_served_no_more_are_masked_when_too_few() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in (*USERS, "late"):
            await send(intake, "shown", user)
        write_turns(stores.ledger, [turn("late", started_ms=NOW_MS)])
        serve_version(stores.ledger, VersionId(1, 2), number=2)
        builder = build(intake, now_ms=NOW_MS + 2_000_000)
        await run(builder)
        assert not [*windows.list_windows(stores.ledger)]
        newer = [turn(user, started_ms=NOW_MS, version=VersionId(1, 2)) for user in USERS]
        write_turns(stores.ledger, newer)
        await run(builder)
    manifest = windows.read_window(stores.ledger, 1)
    assert [each.reason for each in manifest.exclusions] == ["VersionNotServed"]


async def test_a_user_with_many_rollouts_does_not_keep_others_out() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in USERS:
            await send(intake, "shown", user)
        flood = [turn("a", f"r-{n}", started_ms=NOW_MS - 50_000 + n) for n in range(20)]
        write_turns(stores.ledger, [*flood, *(turn(u, started_ms=NOW_MS) for u in USERS[1:])])
        await run(build(intake))
    users = [each.user for each in windows.read_window(stores.ledger, 1).rollouts]
    assert len(set(users)) == len(USERS)


async def test_a_second_pass_reads_only_what_is_new() -> None:
    stores = Stores()
    store = CountingStore()
    stores.ledger = store
    serve_version(store)
    async with living(stores) as intake:
        builder = build(intake, now_ms=NOW_MS)
        for number in range(3):
            await send(intake, "shown", f"u{number}")
            write_turns(store, [turn(f"u{number}", started_ms=NOW_MS)])
            await run(builder)
        store.num_reads = 0
        await run(builder)
        assert store.num_reads == 0
        await send(intake, "shown", "u9")
        write_turns(store, [turn("u9", started_ms=NOW_MS)])
        store.num_reads = 0
        await run(builder)
    assert store.num_reads <= 4  # one object of turns, segments of one consent and one event
    assert len(builder.waiting.histories) == 4
