"""Consent: a pure decision per event, closed unless tenant and user both agreed."""

from enum import StrEnum
from typing import NamedTuple

from etude.feedback.ledger.state import UserConsent

MAX_AHEAD_MS = 300_000
"""Difference of clocks that a decision may lie in the future."""


class ConsentRefusal(StrEnum):
    """Reasons for which an event is not stored."""

    TENANT = "TenantWithoutConsent"
    """The tenant's key has no version of terms: nothing of the tenant is recorded."""
    NOT_GRANTED = "NotGranted"
    """The user has not agreed."""
    OTHER_TERMS = "OtherTerms"
    """The user agreed to other terms than the tenant's."""
    REVOKED = "Revoked"
    """The user took the consent back, or was erased, after the decision that the event names."""
    FUTURE = "FutureDecision"
    """The decision lies in the future by the server's clock."""


class ConsentDecision(NamedTuple):
    """Outcome for one event."""

    refusal: ConsentRefusal | None
    """None: the event may be stored."""
    change: UserConsent | None
    """Decision of the user to record first, if it is news."""


def decide_consent(
    claim: UserConsent, known: UserConsent | None, *, terms: str, now_ms: int
) -> ConsentDecision:
    """Decide whether an event may be stored.

    Args:
        claim: decision of the user that the event names.
        known: newest decision in the ledger.
        terms: version of the tenant's terms; empty for a tenant without consent.
        now_ms: time of the server.
    """
    if claim.decided_ms > now_ms + MAX_AHEAD_MS:
        return ConsentDecision(ConsentRefusal.FUTURE, None)
    is_newer = known is None or claim.decided_ms > known.decided_ms
    if not claim.granted:
        change = _find_revocation(claim, known, now_ms=now_ms)
        return ConsentDecision(ConsentRefusal.NOT_GRANTED, change)
    if not terms or claim.policy_version != terms:
        refusal = ConsentRefusal.OTHER_TERMS if terms else ConsentRefusal.TENANT
        return ConsentDecision(refusal, None)
    if known is not None and known.granted and known.policy_version == terms:
        return ConsentDecision(None, None)
    if is_newer:
        return ConsentDecision(None, claim)
    return ConsentDecision(ConsentRefusal.REVOKED, None)


def decide_revocation(known: UserConsent | None, *, at_ms: int, now_ms: int) -> UserConsent:
    """Revocation to record: it wins over every earlier decision, whatever time it names."""
    earliest_ms = 0 if known is None else known.decided_ms
    decided_ms = max(min(at_ms, now_ms), earliest_ms)
    return UserConsent(granted=False, policy_version="", decided_ms=decided_ms)


def _find_revocation(
    claim: UserConsent, known: UserConsent | None, *, now_ms: int
) -> UserConsent | None:
    """Revocation to record for an event without consent; None if it is no news."""
    if known is None:  # a user of whom nothing is stored has nothing to take back
        return None
    # An agreement may name a time ahead of the server's: against a refusal it is as old as its
    # record, also where the refusal comes late.
    outlasts = claim.decided_ms >= min(known.decided_ms, known.received_ms, now_ms)
    # A second refusal moves the time behind which the user can agree again.
    is_news = known.granted or claim.decided_ms > known.decided_ms
    if not (outlasts and is_news):
        return None
    return decide_revocation(known, at_ms=claim.decided_ms, now_ms=now_ms)
