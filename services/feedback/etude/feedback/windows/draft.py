"""Draft of a window: its rollouts, credited, and those that are left out, as a manifest."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etude.common.feedback.windows import (
    RolloutCounts,
    WindowExclusion,
    WindowManifest,
    WindowRollout,
)
from etude.common.monitors.registry import penalise
from etude.common.monitors.window import Action
from etude.common.weights import VersionId
from etude.feedback.credit import credit_rewards, lowest_reward, reward_rollouts
from etude.feedback.evasions import find_evasions, lower_evasions
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import RolloutOutcome
from etude.feedback.signals.registry import measure_rollouts, signal_versions
from etude.feedback.windows.monitoring import WindowMonitors, count_rollout, make_window
from etude.feedback.windows.settings import WindowRules
from etude.feedback.windows.waiting import LateEvent


class StoredRollout(NamedTuple):
    """A rollout whose object is stored."""

    history: RolloutHistory
    digest: str
    """BLAKE3 of the object."""
    consent: str
    """Version of the terms that its user agrees to now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDraft:
    """A window that is about to be closed."""

    number: int
    run_uid: str
    version: VersionId
    opened_ms: int
    closed_ms: int
    last_sequence: int
    """Newest record of the ledger that its consents are as of."""
    rollouts: Sequence[StoredRollout]
    exclusions: Mapping[str, str]
    """Reasons, by rollout."""
    late: Sequence[LateEvent]
    """Events since the window before about rollouts that earlier windows settled."""

    def finish(self, rules: WindowRules, monitors: WindowMonitors) -> WindowManifest:
        """Credit the rollouts: what a monitor penalises gets the lowest reward, and stays."""
        histories = [each.history for each in self.rollouts]
        outcomes = measure_rollouts(
            histories,
            horizon_s=rules.horizon_s,
            now_ms=self.closed_ms,
            editing=monitors.editing_configs(self.run_uid),
        )
        counts = [count_rollout(history) for history in histories]
        exclusions = self._list_exclusions()
        findings = monitors.evaluate(self.run_uid, make_window(counts, exclusions))
        strata = [name_stratum(history) for history in histories]
        users = [history.user for history in histories]
        earned = _reward(outcomes, counts, users, strata, rules.weights)
        rewards = penalise(earned, findings, floor=lowest_reward(rules.weights))
        credited = credit_rewards(rewards, users, strata)
        return WindowManifest(
            number=self.number,
            run_uid=self.run_uid,
            epoch=self.version.epoch,
            version=self.version.number,
            opened_ms=self.opened_ms,
            closed_ms=self.closed_ms,
            last_sequence=self.last_sequence,
            signals=signal_versions(),
            rollouts=tuple(
                WindowRollout(
                    rollout=each.history.rollout,
                    tenant=each.history.user.tenant,
                    user=each.history.user.digest,
                    digest=each.digest,
                    stratum=stratum,
                    reward=round(credit.reward, 6),
                    advantage=round(credit.advantage, 6),
                    consent=each.consent,
                    counts=count,
                )
                for each, stratum, credit, count in zip(
                    self.rollouts, strata, credited, counts, strict=True
                )
            ),
            exclusions=exclusions,
            late=dict(sorted(Counter(event.kind for event in self.late).items())),
            findings=tuple(
                f"{each.monitor} ({each.action}): {each.sentence}"[:512] for each in findings
            ),
            is_frozen=any(each.action is Action.FREEZE for each in findings),
        )

    def _list_exclusions(self) -> tuple[WindowExclusion, ...]:
        return tuple(
            WindowExclusion(rollout=rollout, reason=reason)
            for rollout, reason in sorted(self.exclusions.items())
        )


def _reward(
    outcomes: Sequence[RolloutOutcome],
    counts: Sequence[RolloutCounts],
    users: Sequence[UserId],
    strata: Sequence[str],
    weights: Mapping[str, float],
) -> list[float]:
    """Rewards by the signals, with evasions worth less than the work.  [N] each -> [N]."""
    return lower_evasions(
        reward_rollouts(outcomes, weights),
        users,
        strata,
        evasions=find_evasions(outcomes, counts, weights),
        has_edits=[each.edits > 0 for each in counts],
        weights=weights,
    )


def name_stratum(history: RolloutHistory) -> str:
    """Name the set of rollouts that a reward is compared with: a tenant's, of one configuration.

    Only what was decided before the policy acted may tell strata apart. A stratum of rollouts that
    edited something would compare those that only asked with each other, and make asking free.
    """
    return f"{history.user.tenant[:100]}/{history.config}"
