"""Consent: closed unless tenant and user agreed, and open to the user's newest decision."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.feedback import events as examples
from tests.support.feedback.lives import NOW_MS, SECRET, SERVER, Stores, ids, living

from etude.feedback.ledger.consent import (
    MAX_AHEAD_MS,
    ConsentRefusal,
    decide_consent,
    decide_revocation,
)
from etude.feedback.ledger.state import UserConsent

TERMS = "v2"
NOW = 1_000_000_000
decisions = st.builds(
    UserConsent,
    granted=st.booleans(),
    policy_version=st.sampled_from(["v1", "v2"]),
    decided_ms=st.integers(0, NOW + 2 * MAX_AHEAD_MS),
)


def agree(terms: str, decided_ms: int) -> UserConsent:
    return UserConsent(granted=True, policy_version=terms, decided_ms=decided_ms)


def refuse(terms: str, decided_ms: int) -> UserConsent:
    return UserConsent(granted=False, policy_version=terms, decided_ms=decided_ms)


@given(claim=decisions, known=st.none() | decisions, terms=st.sampled_from(["", "v1", "v2"]))
def test_nothing_is_stored_without_the_consent_of_tenant_and_user(
    claim: UserConsent, known: UserConsent | None, terms: str
) -> None:
    decision = decide_consent(claim, known, terms=terms, now_ms=NOW)
    if decision.refusal is None:
        assert claim.granted
        assert terms
        assert claim.policy_version == terms
        newest = decision.change or known
        assert newest is not None
        assert newest.granted
        assert newest.policy_version == terms


@given(claim=decisions, known=decisions)
def test_an_older_claim_does_not_undo_a_revocation(claim: UserConsent, known: UserConsent) -> None:
    revoked = decide_revocation(known, at_ms=0, now_ms=NOW)
    assert revoked.decided_ms >= known.decided_ms
    decision = decide_consent(claim, revoked, terms=TERMS, now_ms=NOW)
    if claim.decided_ms <= revoked.decided_ms:
        assert decision.refusal is not None
        assert decision.change is None


@given(
    ahead_ms=st.integers(-MAX_AHEAD_MS, MAX_AHEAD_MS),
    behind_ms=st.integers(0, MAX_AHEAD_MS),
    again_ms=st.integers(-MAX_AHEAD_MS, MAX_AHEAD_MS),
)
def test_a_refusal_of_now_ends_an_agreement_of_a_device_whose_clock_is_ahead(
    ahead_ms: int, behind_ms: int, again_ms: int
) -> None:
    agreed = agree(TERMS, NOW + ahead_ms)
    refused_ms = max(NOW, agreed.decided_ms - behind_ms)
    decision = decide_consent(refuse(TERMS, refused_ms), agreed, terms=TERMS, now_ms=NOW)
    assert decision.refusal is ConsentRefusal.NOT_GRANTED
    assert decision.change is not None
    assert not decision.change.granted
    # The agreement that is sent again does not undo it.
    again = decide_consent(agreed, decision.change, terms=TERMS, now_ms=NOW + MAX_AHEAD_MS)
    assert again.refusal is ConsentRefusal.REVOKED
    later = agree(TERMS, max(NOW, agreed.decided_ms) + 1 + max(0, again_ms))
    assert decide_consent(later, decision.change, terms=TERMS, now_ms=NOW + 10**7).refusal is None


@given(
    ahead_ms=st.integers(1, MAX_AHEAD_MS),
    after_ms=st.integers(0, MAX_AHEAD_MS),
    late_ms=st.integers(0, 10**8),
)
def test_a_refusal_that_comes_late_ends_an_agreement_that_was_dated_ahead(
    ahead_ms: int, after_ms: int, late_ms: int
) -> None:
    """The user agreed on a device whose clock is ahead, and refused later on another one."""
    claim = agree(TERMS, NOW + ahead_ms)
    agreed = claim._replace(received_ms=NOW)
    refusal = refuse(TERMS, NOW + after_ms)
    decision = decide_consent(refusal, agreed, terms=TERMS, now_ms=NOW + after_ms + late_ms)
    assert decision.change is not None
    assert not decision.change.granted
    again = decide_consent(claim, decision.change, terms=TERMS, now_ms=NOW + 10**9)
    assert again.refusal is ConsentRefusal.REVOKED


@given(times=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=12))
def test_a_user_who_agreed_and_refused_last_does_not_consent(
    times: list[tuple[bool, int]],
) -> None:
    known: UserConsent | None = None
    agreed_ms, refused_ms = [-1], [-1]
    for granted, decided_ms in times:
        claim = UserConsent(granted, TERMS, decided_ms)
        known = decide_consent(claim, known, terms=TERMS, now_ms=NOW).change or known
        if granted:
            agreed_ms.append(decided_ms)
        elif len(agreed_ms) > 1:
            refused_ms.append(decided_ms)
    if len(agreed_ms) == 1:
        assert known is None
    elif max(refused_ms) >= max(agreed_ms):
        assert known is not None
        assert not known.granted


@pytest.mark.parametrize(
    ("claim", "known", "terms", "refusal"),
    [
        (agree("v2", 5), None, "v2", None),
        (agree("v2", 5), None, "", ConsentRefusal.TENANT),
        (agree("v1", 5), None, "v2", ConsentRefusal.OTHER_TERMS),
        (refuse("v2", 5), None, "v2", ConsentRefusal.NOT_GRANTED),
        (agree("v2", 5), refuse("", 5), "v2", ConsentRefusal.REVOKED),
        (agree("v2", 6), refuse("", 5), "v2", None),
        (agree("v2", 4), agree("v2", 5), "v2", None),
        (agree("v2", NOW + 400_000), None, "v2", ConsentRefusal.FUTURE),
    ],
)
def test_each_refusal_has_its_reason(
    claim: UserConsent, known: UserConsent | None, terms: str, refusal: ConsentRefusal | None
) -> None:
    assert decide_consent(claim, known, terms=terms, now_ms=NOW).refusal is refusal


async def answer(intake: Any, **fields: Any) -> tuple[int, str]:
    (found,) = await intake.take([examples.encoded(**fields)], SERVER)
    return found.status, found.reason


async def test_a_revocation_ends_the_use_of_what_was_sent_before_and_refuses_what_follows() -> None:
    stores = Stores()
    async with living(stores) as intake:
        assert await answer(intake, id="1") == (202, "Stored")
        assert ids(intake.ledger) == ["1"]
        # A client that knows of the revocation says so with its next event.
        later = "2026-11-01T09:00:00Z"
        assert await answer(intake, id="2", granted=False, decided=later) == (403, "NotGranted")
        assert ids(intake.ledger) == []
        assert await answer(intake, id="3") == (403, "Revoked")
    async with living(stores) as intake:
        assert ids(intake.ledger) == []
        again = "2026-11-01T10:00:00Z"
        assert await answer(intake, id="4", decided=again) == (202, "Stored")
        assert ids(intake.ledger) == ["1", "4"]


async def test_of_a_user_without_consent_nothing_is_stored_at_all() -> None:
    stores = Stores()
    async with living(stores) as intake:
        before = dict(stores.ledger.objects), dict(stores.keys.objects)
        assert await answer(intake, granted=False) == (403, "NotGranted")
        assert await answer(intake, terms="2025-01") == (403, "OtherTerms")
        closed = await intake.take([examples.encoded()], SERVER._replace(consent=""))
        assert [a.reason for a in closed] == ["TenantWithoutConsent"]
        assert (stores.ledger.objects, stores.keys.objects) == before


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["event", "revoke", "erase"]),
            st.sampled_from(["a", "b"]),
            st.booleans(),
            st.integers(0, 9),
        ),
        max_size=25,
    )
)
async def test_no_history_leaves_an_event_of_a_user_who_does_not_consent(
    steps: list[tuple[str, str, bool, int]],
) -> None:
    stores = Stores()
    granted = {"a": False, "b": False}
    last = {"a": -1, "b": -1}
    usable: dict[str, list[str]] = {"a": [], "b": []}
    async with living(stores) as intake:
        for number, (what, user, consents, minute) in enumerate(steps):
            name = SECRET.user_id("acme", user)
            if what == "revoke":
                known = intake.ledger.state.consents.get(name)
                decision = decide_revocation(known, at_ms=NOW_MS, now_ms=NOW_MS)
                intake.ledger.append_consent(name, decision, now_ms=NOW_MS)
                granted[user], last[user] = False, 10
            elif what == "erase":
                await intake.ledger.erase_user(name, now_ms=NOW_MS)
                granted[user], last[user], usable[user] = False, 10, []
            else:
                decided = f"2026-11-01T08:0{minute}:00Z"
                status, _ = await answer(
                    intake, id=f"{user}{number}", user=user, granted=consents, decided=decided
                )
                is_newer = minute > last[user]
                if consents and (granted[user] or is_newer):
                    assert status == 202
                    last[user] = minute if not granted[user] else last[user]
                    granted[user] = True
                    usable[user].append(f"{user}{number}")
                else:
                    assert status == 403
                    if not consents and (is_newer or (granted[user] and minute == last[user])):
                        # Of a user who never agreed nothing is kept.
                        last[user] = minute if last[user] >= 0 else -1
                        granted[user] = False
        expected = sorted(e for user in usable if granted[user] for e in usable[user])
        assert sorted(ids(intake.ledger)) == expected
