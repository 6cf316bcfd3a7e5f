"""Removal of recorded turns, and of what windows train on, at the age that a route keeps them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from etude.common.errors import Problem, UserError
from etude.common.feedback import windows
from etude.common.turns import turn_log
from etude.feedback import metrics
from etude.feedback.ledger.ledger import FeedbackLedger
from etude.feedback.windows.settings import WindowRules

log = logging.getLogger(__name__)

VARIABLE = "ETUDE_FEEDBACK_TURN_RETENTION_S"
USUAL_S = 30 * 86_400
_LONGEST_WAIT_S = 3_600.0
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class TurnRemoval:
    """Removes turns of one route; blocks."""

    ledger: FeedbackLedger
    retention_s: int
    """Age at which turns are removed."""
    clock_ms: Callable[[], int]

    @property
    def interval_s(self) -> float:
        """Time between two passes."""
        return min(_LONGEST_WAIT_S, self.retention_s / 24)

    def run_pass(self) -> None:
        """Remove what is too old.

        Raises:
            FencedError: another service writes the ledger.
            StoreError: the store did not answer; the next pass goes on.
        """
        self.ledger.check_alone()
        before_ms, store = self.clock_ms() - 1_000 * self.retention_s, self.ledger.log.store
        rollouts = windows.list_rollouts(store)
        old = [info.key for info in rollouts if turn_log.is_older(info, before_ms)]
        number = turn_log.remove_turns(store, before_ms=before_ms, others=old)
        metrics.REMOVED_TURN_OBJECTS.inc(number)
        if number:
            log.info(
                "removed %d objects of turns and rollouts from before %d ms", number, before_ms
            )


def choose_retention_s(wanted_s: int, rules: WindowRules, canary_s: int) -> int:
    """Time for which turns are kept; at least as long as windows, tables and a canary read them.

    Args:
        wanted_s: as it was set; 0 for 30 days, or for what is needed if that is longer.
        rules: of windows.
        canary_s: longest time of a canary, whose rollouts are read again after a restart.

    Raises:
        UserError: it is shorter than what is needed.
    """
    settled_s = rules.settled_by_ms(0) // 1_000
    # A table is final a day after the first rollout in it; the day is also room for clocks.
    needed_s = settled_s + int(rules.max_age_s) + canary_s + _DAY_S
    if not wanted_s:
        return max(USUAL_S, needed_s)
    if wanted_s < needed_s:
        what = f"is {wanted_s} s, and turns are needed for {needed_s} s: 10 horizons, the outcome,"
        what += " the age of a window, the longest canary and a day"
        fix = f"set at least {needed_s}, or shorten these"
        raise UserError(Problem("InvalidSpec", what, VARIABLE, fix))
    return wanted_s
