"""Recorded turns of one session whose user allows it, in their order."""

from collections.abc import Collection

from etude.common.blobs import Store
from etude.common.errors import Problem, UserError
from etude.feedback.ledger.reading import LedgerReader
from etude.feedback.sessions.candidates import find_user_refusals
from etude.feedback.turn_keys import find_user, read_turn
from etude.feedback.windows.feeds import TurnFeed
from etude.v1 import turns_pb2


def read_session(
    store: Store, ledger: LedgerReader, tenant: str, session: str, terms: Collection[str]
) -> list[turns_pb2.TurnRecord]:
    """Read the turns of a session with their tokens, without those for a product's own use.

    Args:
        store: of the route.
        ledger: whose users' keys open the turns.
        tenant: of the session.
        session: as `turn_log.identify_rollout` names it.
        terms: versions of the terms that allow it.

    Raises:
        UserError: there is no such session, or its user does not allow it now.
        CorruptError: a turn or a key is damaged.
        StoreError: a store did not answer.
    """
    found: list[turns_pb2.TurnRecord] = []
    for stored in TurnFeed(store).read():
        for record in stored.segment.turns:
            if (record.tenant, record.rollout_id) != (tenant, session) or record.is_side:
                continue
            user = find_user(record, ledger.secret)
            started_ms = record.time_unix_nanos // 1_000_000
            # A record that names no user is nobody's who could allow it.
            reasons = (
                ["NoConsentForTasks"]
                if user is None
                else find_user_refusals(ledger, user, started_ms, terms)
            )
            if record.HasField("withheld"):
                reasons = [*reasons, "HoldsSecret"]
            turn = None if reasons else read_turn(record, ledger.state, ledger.keys)
            if turn is None:
                what = f"is not read: {', '.join(reasons or ['Erased'])}"
                fix = "choose a session of a user who allows it under --terms"
                raise UserError(Problem("Forbidden", what, f"session {session}", fix))
            found.append(turn)
    if not found:
        fix = "name one of the tenant: etude tasks from-sessions lists them"
        raise UserError(Problem("NotFound", f"tenant {tenant} has none", f"session {session}", fix))
    return sorted(found, key=lambda turn: turn.time_unix_nanos)
