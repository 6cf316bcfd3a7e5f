"""Builder of windows: gathers served rollouts, and closes a window when it is full or old.

    rollout objects, created once  ->  consent, asked again  ->  manifest, created once

The manifest commits. Killed before it, the next builder closes another window of the same number;
rollout objects that are stored already are taken as they are. Of two builders one creates the
manifest, and the other one takes it over.
"""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from etude.common.blobs import Store
from etude.common.feedback import windows
from etude.common.feedback.windows import WindowManifest
from etude.feedback import metrics
from etude.feedback.ledger.ledger import FeedbackLedger
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.windows.assembly import UntrainableError
from etude.feedback.windows.draft import StoredRollout, WindowDraft
from etude.feedback.windows.feeds import ErasureItem, LedgerFeed, TurnFeed
from etude.feedback.windows.monitoring import WindowMonitors
from etude.feedback.windows.rollout_objects import RolloutObjects, delete_rollouts
from etude.feedback.windows.selection import FEWEST_USERS, WindowSelection, select_window
from etude.feedback.windows.served_versions import ServedVersions
from etude.feedback.windows.settings import WindowRules
from etude.feedback.windows.waiting import ERASED, NO_CONSENT, WaitingRollouts

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WindowBuilder:
    """Builds the windows of one route. All methods block, and belong to one thread."""

    ledger: FeedbackLedger
    rules: WindowRules
    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    is_stopping: Callable[[], bool] = lambda: False
    """Asked between rollouts: then the window is left to the next service."""
    waiting: WaitingRollouts = field(init=False)
    last_window: int = field(default=0, init=False)
    """Number of the newest window that was read."""
    _versions: ServedVersions = field(init=False)
    _ledger_feed: LedgerFeed = field(init=False)
    _turn_feed: TurnFeed = field(init=False)
    _objects: RolloutObjects = field(init=False)
    _monitors: WindowMonitors = field(init=False)
    _erasing: set[UserId] = field(default_factory=set, init=False)
    """Erased users of whom stored rollouts may be left."""

    def __post_init__(self) -> None:
        self.waiting = WaitingRollouts(self.ledger.secret)
        self._versions = ServedVersions(self.store)
        self._ledger_feed = LedgerFeed(self.ledger)
        self._monitors = WindowMonitors(self.rules.actions)
        self._turn_feed = TurnFeed(self.store, self.rules.horizon_s)
        self._objects = RolloutObjects(self.ledger)

    @property
    def store(self) -> Store:
        return self.ledger.log.store

    def run_pass(self) -> None:
        """Read what is new, delete what was erased, and close the windows that are due.

        A route without channels costs one listing: it serves nothing that could be trained.

        Raises:
            CorruptError: a record of a channel, of a window or of the ledger is damaged.
            FencedError: another service writes the ledger.
            StoreError: a store did not answer; the next pass goes on.
        """
        self._versions.refresh()
        if not self._versions.ever:
            return
        for number in windows.list_windows(self.store, after=self.last_window):
            self._take_over(windows.read_window(self.store, number))
        self._read_ledger()
        for stored in self._turn_feed.read():
            self.waiting.add_turns(stored)
        while (selection := self._select()) is not None and self._close(selection):
            pass
        metrics.WAITING_ROLLOUTS.set(len(self.waiting.histories))

    def _take_over(self, manifest: WindowManifest) -> None:
        """Settle what a window has. Its builder may not have known of an erasure."""
        self.last_window = manifest.number
        self.waiting.settle(manifest)
        self._monitors.add(manifest)
        for each in manifest.rollouts:
            user = UserId(each.tenant, each.user)
            erasure = self.waiting.erasures.get(user)
            if erasure is not None and erasure.sequence > manifest.last_sequence:
                self._erasing.add(user)

    def _read_ledger(self) -> None:
        for item in self._ledger_feed.read():
            self.waiting.apply(item)
            if isinstance(item, ErasureItem):
                self._erasing.add(item.user)
        if self._erasing:
            delete_rollouts(self.store, self._erasing, self.waiting.erasures)
            self._erasing.clear()

    def _select(self) -> WindowSelection | None:
        versions = self._versions
        return select_window(
            self.waiting,
            self.rules,
            served=versions.ever,
            current=versions.current,
            now_ms=self.clock_ms(),
        )

    def _close(self, selection: WindowSelection) -> bool:
        """Close a window; false if it has too few rollouts in the end, or another builder did.

        Raises:
            FencedError: another service writes the ledger.
            StoreError: a store did not answer.
        """
        self.ledger.check_alone()
        masks = dict(selection.masks)
        stored = self._write_objects(selection, masks)
        self._read_ledger()
        agreed = self._ask_consent(stored, masks)
        is_large_enough = len(agreed) >= self.rules.min_rollouts
        has_users = len({each.history.user for each in agreed}) >= FEWEST_USERS
        if not (is_large_enough and has_users):
            return False
        self.ledger.check_alone()
        self._delete_refused(masks)
        draft = WindowDraft(
            number=self.last_window + 1,
            run_uid=selection.policy.run_uid,
            version=selection.policy.version,
            opened_ms=selection.opened_ms,
            closed_ms=self.clock_ms(),
            last_sequence=self._ledger_feed.position,
            rollouts=agreed,
            # The rest is excluded by the next window.
            exclusions=dict(itertools.islice(masks.items(), windows.MAX_ROLLOUTS)),
            late=self.waiting.late,
        )
        manifest = draft.finish(self.rules, self._monitors)
        created = windows.create_window(self.store, manifest)
        self._take_over(created)
        if created != manifest:
            return False
        metrics.WINDOWS.inc()
        metrics.WINDOW_ROLLOUTS.labels("trained").inc(len(created.rollouts))
        for each in created.exclusions:
            metrics.WINDOW_ROLLOUTS.labels(each.reason).inc()
        for kind, number in created.late.items():
            metrics.LATE_EVENTS.labels(kind).inc(number)
        for sentence in created.findings:
            log.warning("window %d: %s", created.number, sentence)
        log.info(
            "window %d of version %s has %d rollouts", created.number, created.policy, len(agreed)
        )
        return True

    def _write_objects(
        self, selection: WindowSelection, masks: dict[str, str]
    ) -> list[StoredRollout]:
        stored: list[StoredRollout] = []
        for history in selection.histories:
            if self.is_stopping():
                return []
            try:
                stored.append(StoredRollout(history, self._objects.write(history), ""))
            except UntrainableError as error:
                history.mask = masks[history.rollout] = error.mask
                log.warning("rollout %s is not trained on: %s", history.rollout, error)
        return stored

    def _ask_consent(
        self, stored: Sequence[StoredRollout], masks: dict[str, str]
    ) -> list[StoredRollout]:
        agreed: list[StoredRollout] = []
        for each in stored:
            mask = self.waiting.find_mask(each.history)
            if mask:
                masks[each.history.rollout] = mask
            else:
                terms = self.waiting.consents[each.history.user]
                agreed.append(each._replace(consent=terms))
        return agreed

    def _delete_refused(self, masks: Mapping[str, str]) -> None:
        """Delete objects of users who do not agree any more, which an earlier attempt wrote."""
        refused = [name for name, mask in masks.items() if mask in {NO_CONSENT, ERASED}]
        users = [self.waiting.histories[name].user for name in refused]
        self.store.delete(
            [windows.rollout_key(*user, name) for user, name in zip(users, refused, strict=True)]
        )
