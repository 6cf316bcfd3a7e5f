"""Canary loop: looks at users' figures and at monitors."""

import logging
from dataclasses import dataclass

from etude.common.blobs import Store
from etude.common.errors import CorruptError
from etude.common.feedback import windows
from etude.feedback.clock import LedgerClock
from etude.feedback.release.evidence import CanaryLook, MonitorFindings
from etude.feedback.release.release_log import ReleaseLog
from etude.feedback.release.rollouts import CanaryRollouts

log = logging.getLogger(__name__)


@dataclass(slots=True)
class CanaryLoop:
    """Looks at the candidate under test, at its users and at the windows of rollouts."""

    releases: ReleaseLog
    rollouts: CanaryRollouts
    clock: LedgerClock
    _window: int = 0
    """Newest window whose findings were read."""

    def run_pass(self) -> None:
        """Freeze if monitors ask for it, then look at the users of a canary; blocks.

        Raises:
            CorruptError: a record or the ledger is damaged.
            FencedError: another service decides for this route.
            StoreError: the store did not answer; the next pass goes on.
        """
        store, releases = self.releases.store, self.releases
        releases.check_alone()
        for number in windows.list_windows(store, after=max(self._window, releases.state.window)):
            sentences = _read_findings(store, number)
            if sentences:
                findings = MonitorFindings(window=number, sentences=sentences)
                releases.observe(findings, now_ms=self.clock.now_ms())
            self._window = number
        canary = releases.state.canary
        self.rollouts.read(canary.experiment if canary else "")
        if canary is not None:
            now_ms = self.clock.now_ms()
            data = self.rollouts.summarise(canary, now_ms=now_ms)
            look = CanaryLook(experiment=canary.experiment, data=data)
            releases.observe(look, now_ms=now_ms)


def _read_findings(store: Store, number: int) -> tuple[str, ...]:
    """Reasons to freeze that a window has; a damaged one may hide them."""
    try:
        manifest = windows.read_window(store, number)
    except CorruptError as error:
        log.warning("window %d: %s", number, error)
        return ("its manifest is damaged",)
    if not manifest.is_frozen:
        return ()
    return manifest.findings or ("a monitor is raised",)
