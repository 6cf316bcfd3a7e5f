"""Offline audit of a route's windows: every served rollout is trained once, waits, or is masked."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from blake3 import blake3

from etude.common.blobs import MissingError, Store
from etude.common.durable_log import LogReader
from etude.common.errors import CorruptError
from etude.common.feedback import windows
from etude.common.feedback.windows import WindowManifest, WindowRollout
from etude.common.turns import turn_log
from etude.feedback import credit
from etude.feedback.ledger import records
from etude.feedback.ledger.ledger import ledger_source
from etude.feedback.ledger.user_keys import LedgerSecret, UserId
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.windows.feeds import TurnFeed
from etude.feedback.windows.settings import WindowRules
from etude.feedback.windows.waiting import WaitingRollouts

_CLOCKS_MS = 300_000
"""Difference between the clocks of the store and of the feedback service."""
_ROUNDING = 1e-5
"""Of one advantage, in the sums of a user."""


class WindowFinding(NamedTuple):
    """One broken invariant of windows."""

    invariant: str
    """manifest: damaged or missing; served; tenant; once; version; consent; erasure; object;
    cap."""
    what: str


class UserDecision(NamedTuple):
    """A consent, a revocation or an erasure."""

    sequence: int
    granted: bool
    terms: str
    erased_ms: int
    """Time of an erasure; 0 for the others."""


@dataclass(slots=True)
class WindowAudit:
    """Counts of served rollouts, and broken invariants of their windows."""

    num_windows: int = 0
    num_served: int = 0
    """Rollouts with a turn in the log, or in a window."""
    num_removed: int = 0
    """Rollouts of windows whose turns are removed: they are not compared with them."""
    removed_ms: int = 0
    """Time before which turns are removed; 0 for never."""
    num_trained: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    """By reason."""
    findings: list[WindowFinding] = field(default_factory=list)
    _settled: set[str] = field(default_factory=set)

    @property
    def num_waiting(self) -> int:
        return self.num_served - self.num_trained - self.masked.total()

    def report(self, invariant: str, what: str) -> None:
        self.findings.append(WindowFinding(invariant, what))

    def settle(self, rollout: str, where: str, *, is_served: bool, may_be_removed: bool) -> None:
        """Count a rollout that a window trains or masks."""
        if not is_served and may_be_removed:
            self.num_removed += 1
            self.num_served += 1
        elif not is_served:
            self.report("served", f"{where} names rollout {rollout}, which has no turn")
        if rollout in self._settled:
            self.report("once", f"{where} names rollout {rollout} again")
        self._settled.add(rollout)


@dataclass(slots=True)
class _Evidence:
    """All that windows are compared with."""

    store: Store
    served: dict[str, RolloutHistory]
    decisions: dict[UserId, list[UserDecision]]
    last_sequence: int
    rules: WindowRules


def audit_windows(
    store: Store, secret: LedgerSecret, rules: WindowRules, *, uid: str
) -> WindowAudit:
    """Audit all windows of a route against its turn log and its ledger; blocks.

    Args:
        store: of the route.
        secret: of the ledger, by which turns and events are joined.
        rules: of the windows: the only tenant whose rollouts may train, and the longest time from
            a rollout's start to its window, by which it is known whose turns may be removed.
        uid: name of the ledger.

    Raises:
        CorruptError: the ledger is damaged: audit that first.
        StoreError: the store did not answer.
    """
    audit, waiting = WindowAudit(), WaitingRollouts(secret)
    # Windows first: whatever they name was served, and decided, before.
    numbers = list(windows.list_windows(store))
    for stored in TurnFeed(store).read():
        waiting.add_turns(stored)
    # Behind the turns: what was removed while they were read is older than this.
    audit.removed_ms = turn_log.read_removed_ms(store)
    decisions, last_sequence = _read_decisions(store, uid)
    evidence = _Evidence(store, waiting.histories, decisions, last_sequence, rules)
    audit.num_served = len(evidence.served)
    for expected, number in enumerate(numbers, 1):
        if number != expected:
            audit.report("manifest", f"window {number} follows {expected - 1}")
            break
    for number in numbers:
        try:
            manifest = windows.read_window(store, number)
        except (CorruptError, MissingError) as error:
            audit.report("manifest", str(error))
        else:
            _check_window(audit, evidence, manifest)
    return audit


def _read_decisions(store: Store, uid: str) -> tuple[dict[UserId, list[UserDecision]], int]:
    decisions: dict[UserId, list[UserDecision]] = defaultdict(list)
    last = 0
    for segment in LogReader.read_listing(ledger_source(store, uid)).accepted_segments():
        for framed in segment.records:
            last, _, body = records.parse_record(framed, segment.where)
            if body.HasField("consent"):
                consent = body.consent
                decisions[UserId(consent.tenant, consent.user_digest)].append(
                    UserDecision(last, consent.granted, consent.policy_version, 0)
                )
            elif body.HasField("erasure"):
                erasure = body.erasure
                decisions[UserId(erasure.tenant, erasure.user_digest)].append(
                    UserDecision(last, granted=False, terms="", erased_ms=erasure.received_ms)
                )
    return decisions, last


def _check_window(audit: WindowAudit, evidence: _Evidence, manifest: WindowManifest) -> None:
    where = f"window {manifest.number}"
    audit.num_windows += 1
    if manifest.last_sequence > evidence.last_sequence:
        audit.report("consent", f"{where} counts records that the ledger does not have")
    for exclusion in manifest.exclusions:
        audit.settle(
            exclusion.rollout,
            where,
            is_served=exclusion.rollout in evidence.served,
            # Of any age: a rollout may have waited for a window until its turns were removed.
            may_be_removed=audit.removed_ms > 0,
        )
        audit.masked[exclusion.reason] += 1
    for each in manifest.rollouts:
        audit.settle(
            each.rollout,
            where,
            is_served=each.rollout in evidence.served,
            may_be_removed=_may_be_removed(audit, evidence, manifest),
        )
        audit.num_trained += 1
        _check_origin(audit, evidence, manifest, each)
        _check_consent(audit, evidence, manifest, each)
    _check_caps(audit, manifest)


def _may_be_removed(audit: WindowAudit, evidence: _Evidence, manifest: WindowManifest) -> bool:
    """Return true if a rollout that a window trains began before turns were kept."""
    started_ms = manifest.opened_ms - evidence.rules.settled_by_ms(0) - _CLOCKS_MS
    return audit.removed_ms > max(0, started_ms)


def _check_origin(
    audit: WindowAudit, evidence: _Evidence, manifest: WindowManifest, rollout: WindowRollout
) -> None:
    history = evidence.served.get(rollout.rollout)
    if history is None:
        return
    where = f"window {manifest.number}, rollout {rollout.rollout}"
    if history.user != UserId(rollout.tenant, rollout.user):
        audit.report("served", f"{where}: its turns are of another user")
    if evidence.rules.tenant not in {"", rollout.tenant}:
        audit.report("tenant", f"{where}: it is of tenant {rollout.tenant}")
    # Later turns of a settled rollout are not trained, and may be of another version.
    turns = [turn for turn in history.main_turns if turn.run_uid in {"", manifest.run_uid}]
    is_sampled = manifest.policy in {turn.policy for turn in turns}
    if not is_sampled and not _may_be_removed(audit, evidence, manifest):
        what = f"{manifest.policy} of run {manifest.run_uid} sampled no turn of it"
        audit.report("version", f"{where}: {what}")


def _check_consent(
    audit: WindowAudit, evidence: _Evidence, manifest: WindowManifest, rollout: WindowRollout
) -> None:
    where = f"window {manifest.number}, rollout {rollout.rollout}"
    user = UserId(rollout.tenant, rollout.user)
    decisions = evidence.decisions.get(user, [])
    before = [each for each in decisions if each.sequence <= manifest.last_sequence]
    if not before or not before[-1].granted or before[-1].terms != rollout.consent:
        audit.report("consent", f"{where}: its user did not agree to {rollout.consent!r}")
    history = evidence.served.get(rollout.rollout)
    erased_ms = max((each.erased_ms for each in before), default=0)
    if history is not None and history.started_ms <= erased_ms:
        audit.report("erasure", f"{where}: it began before an erasure of its user")
    is_erased_since = any(each.erased_ms for each in decisions[len(before) :])
    key = windows.rollout_key(rollout.tenant, rollout.user, rollout.rollout)
    try:
        data = evidence.store.get(key)
    except MissingError:
        # It was created once its signals had come.
        is_kept = audit.removed_ms <= manifest.opened_ms - _CLOCKS_MS
        if not is_erased_since and is_kept:
            audit.report("object", f"{where}: {key} is missing")
        return
    if is_erased_since:
        audit.report("erasure", f"{where}: {key} is there, and its user was erased")
    if blake3(data).hexdigest() != rollout.digest:
        audit.report("object", f"{where}: {key} has another content")


def _check_caps(audit: WindowAudit, manifest: WindowManifest) -> None:
    """Add up the advantages of each user, and compare them with what one may have."""
    masses: dict[UserId, float] = defaultdict(float)
    for each in manifest.rollouts:
        masses[UserId(each.tenant, each.user)] += abs(each.advantage)
    ordered = sorted(mass for mass in masses.values() if mass > 0)
    if not ordered:
        return
    cap = credit.MEDIAN_USERS * ordered[(len(ordered) - 1) // 2]
    if len(ordered) * credit.USER_SHARE >= 1:
        cap = min(cap, credit.USER_SHARE * sum(ordered))
    if ordered[-1] > cap + _ROUNDING * len(manifest.rollouts):
        what = f"a user has {ordered[-1]:.4f} of {sum(ordered):.4f}, at most {cap:.4f} are allowed"
        audit.report("cap", f"window {manifest.number}: {what}")
