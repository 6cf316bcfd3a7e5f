"""Removal by age: turns and the rollouts that windows train on, not windows and events."""

from dataclasses import replace

from tests.support.feedback import events as examples
from tests.support.feedback.lives import NOW_MS, SECRET, SERVER, Stores, living
from tests.support.feedback.turns import serve_version, turn, write_turns

from etude.common.blobs import MemoryStore
from etude.common.feedback import windows
from etude.common.turns import turn_log
from etude.feedback.turn_removal import TurnRemoval
from etude.feedback.windows.audit import audit_windows
from etude.feedback.windows.builder import WindowBuilder
from etude.feedback.windows.settings import WindowRules

RULES = WindowRules(num_rollouts=3, min_rollouts=3, max_age_s=500, horizon_s=100)
RETENTION_S = 10_000
SETTLED_MS = NOW_MS + 2_000_000


def prefixes(store: MemoryStore) -> set[str]:
    return {key.partition("/")[0] for key in store.objects}


async def test_turns_and_what_windows_train_on_go_at_their_age_and_the_rest_stays() -> None:
    now_ms = NOW_MS
    stores = Stores()
    stores.ledger.clock = lambda: now_ms / 1_000
    serve_version(stores.ledger)
    stores.ledger.put("rollouts/000012/train.jsonl", b"")  # a row of the run, whose store it is
    async with living(stores) as intake:
        for user in "abc":
            await intake.take([examples.encoded("shown", id=user, user=user)], SERVER)
        write_turns(stores.ledger, [turn(user, started_ms=NOW_MS) for user in "abcd"])
        now_ms = SETTLED_MS
        WindowBuilder(intake.ledger, RULES, clock_ms=lambda: now_ms).run_pass()
        removal = TurnRemoval(intake.ledger, RETENTION_S, lambda: now_ms)
        before = prefixes(stores.ledger)
        assert {"turns", "rollouts", "windows"} < before
        now_ms = NOW_MS + 1_000 * RETENTION_S
        removal.run_pass()
        assert prefixes(stores.ledger) == before
        now_ms += 1
        removal.run_pass()
        assert prefixes(stores.ledger) == before - {"turns"} | {"removed-turns"}
        now_ms = SETTLED_MS + 1_000 * RETENTION_S + 1
        removal.run_pass()
        assert prefixes(stores.ledger) == before - {"turns"} | {"removed-turns"}
        assert [key for key in stores.ledger.objects if key.startswith("rollouts/")] == [
            "rollouts/000012/train.jsonl"
        ]
    audit = audit_windows(stores.ledger, SECRET, RULES, uid="test")
    assert audit.findings == []
    assert (audit.num_trained, audit.masked, audit.num_removed) == (3, {"NoConsent": 1}, 4)
    assert len([*windows.list_windows(stores.ledger)]) == 1
    assert turn_log.read_removed_ms(stores.ledger) == SETTLED_MS + 1


async def test_a_rollout_that_waited_until_its_turns_were_removed_is_masked() -> None:
    now_ms = NOW_MS
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in "abcd":
            await intake.take([examples.encoded("shown", id=user, user=user)], SERVER)
        write_turns(stores.ledger, [turn("d", started_ms=NOW_MS)], "old")
        write_turns(stores.ledger, [turn(user, started_ms=NOW_MS) for user in "abc"], "new")
        rules = replace(RULES, num_rollouts=4)
        builder = WindowBuilder(intake.ledger, rules, clock_ms=lambda: now_ms)
        builder.run_pass()
        stores.ledger.delete([turn_log.segment_key("old", 0)])
        now_ms = SETTLED_MS
        builder.run_pass()
    manifest = windows.read_window(stores.ledger, 1)
    assert len(manifest.rollouts) == 3
    assert [each.reason for each in manifest.exclusions] == ["TurnsRemoved"]
