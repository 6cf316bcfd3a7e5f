"""Rows of the tables, from what the ledger and the windows hold; pure."""

from collections.abc import Container, Iterator

from etude.common.feedback.windows import WindowManifest
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.outcome import RolloutOutcome
from etude.feedback.tables.schema import EVENTS, Row
from etude.feedback.windows.feeds import ConsentItem, EventItem

TEXTS = frozenset({"text", "comment", "diff", "line_hashes"})
"""Fields of payloads that are no figures: they are in no table."""


def event_row(item: EventItem) -> Row:
    """Row of an event, without its texts."""
    data = item.whole.data
    payload = data.payload.model_dump(mode="json", by_alias=False, exclude=TEXTS)
    return {
        "sequence": item.sequence,
        "received_at": 1_000 * item.received_ms,
        "tenant": item.user.tenant,
        "user": item.user.digest,
        "kind": item.whole.kind,
        "rollout": item.rollout,
        "conversation": item.whole.subject,
        "source": item.whole.source,
        "policy_version": data.policy_version,
        "experiment": data.experiment,
        "arm": data.arm,
        # A payload has no say about the names above.
        **{name: value for name, value in payload.items() if name in EVENTS.names[11:]},
    }


def consent_row(item: ConsentItem) -> Row:
    """Row of a user's decision."""
    return {
        "sequence": item.sequence,
        "received_at": 1_000 * item.received_ms,
        "tenant": item.user.tenant,
        "user": item.user.digest,
        "granted": item.granted,
        "terms": item.policy_version,
        "decided_at": 1_000 * item.decided_ms,
    }


def outcome_rows(outcome: RolloutOutcome) -> Iterator[Row]:
    """A row for each signal of a rollout."""
    for signal, value in outcome.values.items():
        yield {
            "started_at": 1_000 * outcome.started_ms,
            "tenant": outcome.tenant,
            "user": outcome.user,
            "rollout": outcome.rollout,
            "epoch": outcome.policy.epoch if outcome.policy else None,
            "version": outcome.policy.number if outcome.policy else None,
            "experiment": outcome.experiment,
            "arm": outcome.arm,
            "signal": signal,
            "numerator": value.numerator,
            "denominator": value.denominator,
            "state": value.state.value,
        }


def window_row(manifest: WindowManifest) -> Row:
    """Row of a window."""
    return {
        "window": manifest.number,
        "closed_at": 1_000 * manifest.closed_ms,
        "opened_at": 1_000 * manifest.opened_ms,
        "run_uid": manifest.run_uid,
        "epoch": manifest.epoch,
        "version": manifest.version,
        "num_rollouts": len(manifest.rollouts),
        "num_exclusions": len(manifest.exclusions),
        "is_frozen": manifest.is_frozen,
        "findings": list(manifest.findings),
    }


def window_rollout_rows(manifest: WindowManifest, *, erased: Container[UserId]) -> Iterator[Row]:
    """A row for each rollout of a window, but those of erased users."""
    common = {"window": manifest.number, "closed_at": 1_000 * manifest.closed_ms}
    for each in manifest.rollouts:
        if UserId(each.tenant, each.user) not in erased:
            yield {
                **common,
                **each.model_dump(include={"tenant", "user", "rollout", "stratum"}),
                "exclusion": "",
                "reward": each.reward,
                "advantage": each.advantage,
                "terms": each.consent,
                **each.counts.model_dump(),
            }
    for exclusion in manifest.exclusions:
        yield {**common, "rollout": exclusion.rollout, "exclusion": exclusion.reason}
