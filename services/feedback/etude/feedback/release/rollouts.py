"""Rollouts of a canary's users and of the time before it, followed from turns and events."""

from dataclasses import dataclass, field

from etude.feedback.experiments.verdict import CanaryData
from etude.feedback.ledger.ledger import FeedbackLedger
from etude.feedback.release.figures import summarise_arms
from etude.feedback.release.state import CanaryState
from etude.feedback.signals.registry import measure_arms
from etude.feedback.windows.feeds import LedgerFeed, TurnFeed
from etude.feedback.windows.waiting import ERASED, NO_CONSENT, WaitingRollouts

MAX_EARLIER = 100_000
"""Rollouts outside of the experiment that are kept, for the histories of users: the newest."""

_LEFT_OUT = frozenset({ERASED, NO_CONSENT, "OnlySideTurns"})
"""Masks of rollouts that say nothing, or may not be used; others cannot be trained, and count."""


@dataclass(slots=True)
class CanaryRollouts:
    """Follows the ledger and the turn log; blocks, and belongs to one thread.

    Apart from the builder of windows: what ends that does not end the watch over a canary.
    """

    ledger: FeedbackLedger
    horizon_s: float
    """Time after a rollout's last turn in which its signals come."""
    _waiting: WaitingRollouts = field(init=False)
    _ledger_feed: LedgerFeed = field(init=False)
    _turn_feed: TurnFeed = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = WaitingRollouts(self.ledger.secret)
        self._ledger_feed = LedgerFeed(self.ledger)
        self._turn_feed = TurnFeed(self.ledger.log.store, self.horizon_s)

    def read(self, experiment: str) -> None:
        """Read what is new; rollouts of other experiments are forgotten at some time.

        Raises:
            CorruptError: a segment of the ledger is damaged.
            StoreError: the store did not answer; the next call goes on.
        """
        for item in self._ledger_feed.read():
            self._waiting.apply(item)
        for stored in self._turn_feed.read():
            self._waiting.add_turns(stored)
        histories = self._waiting.histories
        others = [
            name for name, each in histories.items() if each.turns[0].experiment != experiment
        ]
        self._waiting.forget(others[: max(0, len(others) - MAX_EARLIER)])

    def summarise(self, canary: CanaryState, *, now_ms: int) -> CanaryData:
        """Figures of the users of a canary who consent now."""
        histories = [
            each
            for each in self._waiting.histories.values()
            if self._waiting.find_mask(each) not in _LEFT_OUT
        ]
        outcomes = measure_arms(histories, horizon_s=self.horizon_s, now_ms=now_ms)
        return summarise_arms(
            outcomes,
            canary.rules.metrics,
            experiment=canary.experiment,
            candidate=canary.candidate.version,
            started_ms=canary.started_ms,
        )
