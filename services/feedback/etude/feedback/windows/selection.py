"""Selection of a window's rollouts: pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from typing import NamedTuple

from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.windows.served_versions import RunVersion
from etude.feedback.windows.settings import WindowRules
from etude.feedback.windows.waiting import WaitingRollouts

FEWEST_USERS = 2
"""Of a window: a user's rollouts are compared with those of others."""
OTHER_TENANT = "OtherTenant"
"""Mask of rollouts of another tenant than the one whose windows these are."""


class SettledRollout(NamedTuple):
    """A rollout whose signals wait for nothing."""

    settled_ms: int
    history: RolloutHistory


class WindowSelection(NamedTuple):
    """A window that is due."""

    policy: RunVersion
    opened_ms: int
    """Time at which its first rollout was settled."""
    histories: Sequence[RolloutHistory]
    masks: dict[str, str]
    """Reasons of settled rollouts of any version that are left out of training, by rollout."""


def select_window(
    waiting: WaitingRollouts,
    rules: WindowRules,
    *,
    served: Set[RunVersion],
    current: Set[RunVersion],
    now_ms: int,
) -> WindowSelection | None:
    """Select the rollouts of a window that is due; None if there is none.

    Args:
        waiting: rollouts that are in no window.
        rules: of the windows.
        served: versions that a channel serves or served.
        current: versions that one serves now.
        now_ms: time of the server.
    """
    masks: dict[str, str] = {}
    groups: dict[RunVersion, list[SettledRollout]] = defaultdict(list)
    for each in _find_settled(waiting, rules, now_ms=now_ms):
        history = each.history
        mask, policy = waiting.find_mask(history), _find_served(history, served)
        if rules.tenant and history.user.tenant != rules.tenant:
            mask = OTHER_TENANT
        if mask or policy is None:
            masks[history.rollout] = mask or "VersionNotServed"
        else:
            groups[policy].append(each)
    oldest_ms = now_ms - int(1_000 * rules.max_age_s)
    due: list[RunVersion] = []
    for policy, group in sorted(groups.items()):
        is_old = group[0].settled_ms <= oldest_ms
        num_users = len({each.history.user for each in group})
        fewest = rules.min_rollouts if is_old else rules.num_rollouts
        if len(group) >= fewest and num_users >= FEWEST_USERS:
            due.append(policy)
        elif is_old and policy not in current:
            masks.update((each.history.rollout, "VersionNotServed") for each in group)
    if not due:
        return None
    chosen = _take_in_turn(groups[due[0]], rules.num_rollouts)
    opened_ms = min(each.settled_ms for each in chosen)
    return WindowSelection(due[0], opened_ms, [each.history for each in chosen], masks)


def _find_served(history: RolloutHistory, served: Set[RunVersion]) -> RunVersion | None:
    """Served version that sampled a rollout; of any run, where its engines did not name theirs."""
    if history.policy is None:
        return None
    if history.run_uid:
        policy = RunVersion(history.run_uid, history.policy)
        return policy if policy in served else None
    return max((each for each in served if each.version == history.policy), default=None)


def _find_settled(
    waiting: WaitingRollouts, rules: WindowRules, *, now_ms: int
) -> list[SettledRollout]:
    """Settled rollouts, the oldest first."""
    found = [
        SettledRollout(
            rules.settled_ms(
                started_ms=history.started_ms, last_ms=history.last_ms, is_open=history.is_open
            ),
            history,
        )
        for history in waiting.histories.values()
    ]
    settled = [each for each in found if each.settled_ms <= now_ms]
    return sorted(settled, key=lambda each: (each.settled_ms, each.history.rollout))


def _take_in_turn(group: Sequence[SettledRollout], number: int) -> list[SettledRollout]:
    """Take the first rollouts of every user before anyone's second ones: none fills a window."""
    ranks: Counter[UserId] = Counter()
    ranked: list[tuple[int, int, SettledRollout]] = []
    for place, each in enumerate(group):
        ranked.append((ranks[each.history.user], place, each))
        ranks[each.history.user] += 1
    return [each for _, _, each in sorted(ranked, key=lambda rank: rank[:2])[:number]]
