"""Act 3 of the real-time demo: what counts as stopped, as rolled back, and as shown."""

from math import inf

import pytest

from etude.cli.releases.client import DecisionText
from etude.common.blobs.memory import MemoryStore
from etude.common.release.channels import ChannelExperiment
from etude.demo.realtime.release_stage import RULES
from etude.demo.realtime.serving import TENANT
from etude.demo.realtime.summary import PlayedActs
from etude.demo.realtime.third_act import (
    ThirdAct,
    check_evidence,
    check_gate,
    check_rollback,
    find_treated,
)
from etude.feedback.release.decision import ReleaseAction, ReleaseDecision
from etude.feedback.release.records import (
    ReleaseRecord,
    create_evidence,
    create_release,
    release_key,
)
from etude.feedback.release.rules import ReleaseRules
from etude.feedback.release.state import ReleaseState
from etude.gateway.arms import choose_arm

STOPPED = DecisionText("Refuse", "1.6 stopped by the gate: refused: success worse by 82 points")
STARTED = DecisionText("StartCanary", "1.4 goes to 25 % of users: gate passed")
WORSE = "rolled back: complaints +6.1 points, 99 % interval [2.7, 9.5], 376 users"


def make_record(sentence: str, action: str = "Rollback", evidence: str = "0" * 64) -> ReleaseRecord:
    return ReleaseRecord(
        number=1,
        action=action,
        sentence=sentence,
        evidence=evidence,
        decided_ms=1,
        state=ReleaseState(),
    )


def test_the_gate_holds_if_it_stops_the_one_candidate_and_lets_the_other_pass() -> None:
    assert all(check.is_held for check in check_gate(STOPPED, STARTED, is_tried=False))


@pytest.mark.parametrize(
    ("refusal", "start", "is_tried", "held"),
    [
        (STARTED, STARTED, False, [False, True]),
        (STOPPED, STOPPED, False, [True, False]),
        (STOPPED, STARTED, True, [False, True]),
        (DecisionText("Refuse", "refused: 1.4 is being tested"), STARTED, False, [False, True]),
    ],
)
def test_the_gate_misses_its_promise_otherwise(
    refusal: DecisionText, start: DecisionText, *, is_tried: bool, held: list[bool]
) -> None:
    checks = check_gate(refusal, start, is_tried=is_tried)
    assert [check.is_held for check in checks] == held


def test_only_a_guardrail_of_users_counts_as_a_roll_back() -> None:
    assert check_rollback(make_record(WORSE)).is_held
    late = "rolled back: not enough data: edit persistence +0.1 points, and no more are planned"
    by_hand = "1.4 rolled back by backend: it is enough"
    for sentence in (late, by_hand):
        assert not check_rollback(make_record(sentence)).is_held
    assert not check_rollback(make_record(WORSE, action="Promote")).is_held
    assert not check_rollback(None).is_held


def test_evidence_that_is_damaged_is_found_by_its_digest() -> None:
    store = MemoryStore()
    decision = ReleaseDecision(
        action=ReleaseAction.ROLL_BACK,
        sentence=WORSE,
        state=ReleaseState(),
        evidence={"users": 376},
    )
    digest = create_evidence(store, decision, decided_ms=1)
    create_release(store, make_record(WORSE, evidence=digest))
    assert check_evidence(store, 1).is_held
    store.delete([f"evidence/{digest}.json"])
    store.put(f"evidence/{digest}.json", b"{}")
    assert not check_evidence(store, 1).is_held
    assert release_key(1) == "release/000000000001.json"


def test_probes_are_users_whom_the_gateway_sends_to_the_canary() -> None:
    users = [f"user-{number:04d}" for number in range(40)]
    experiment = ChannelExperiment(name="canary-1", salt="salt", share=5_000)
    treated = find_treated("canary-1", "salt", users)
    assert treated == [u for u in users if choose_arm(experiment, TENANT, u).channel == "canary"]
    assert 0 < len(treated) < len(users)


def test_the_rules_are_rules_of_a_route() -> None:
    rules = ReleaseRules.parse_known_fields(RULES)
    assert rules.canary.steps == (2_500, 5_000)
    assert [each.name for each in rules.canary.guardrails] == ["complaints"]


def test_the_last_line_tells_of_the_acts_that_were_played() -> None:
    act = ThirdAct(
        gate_stopped=1,
        canary_rolled_back=1,
        rollback_s=2.04,
        num_requests=900,
        num_failed=0,
        num_retried=0,
        arms=(),
        checks=check_gate(STOPPED, STARTED, is_tried=False),
    )
    acts = PlayedActs(third=act)
    assert acts.summarize(101.2) == (
        "realtime: served 900 requests, failed 0, retried 0"
        " | gate stopped 1, canary rolled back 1 in 2.0 s | total 101 s"
    )
    assert acts.collect_figures(inf) == {
        "gate_stopped": 1,
        "canary_rolled_back": 1,
        "rollback_s": 2.04,
        "requests": 900,
        "failed": 0,
        "retried": 0,
        "total_s": inf,
    }
    assert len(acts.checks) == 2


def test_a_canary_without_an_end_has_no_time_of_a_roll_back() -> None:
    act = ThirdAct(
        gate_stopped=1,
        canary_rolled_back=0,
        rollback_s=None,
        num_requests=900,
        num_failed=0,
        num_retried=0,
        arms=(),
        checks=(check_rollback(None),),
    )
    acts = PlayedActs(third=act)
    assert "gate stopped 1, canary rolled back 0 |" in acts.summarize(1.0)
    assert "rollback_s" not in acts.collect_figures(1.0)
