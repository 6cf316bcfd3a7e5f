"""Weight audits: scans of the live words, and the report when memory is damaged."""

import asyncio
import logging
from dataclasses import dataclass

from etude.common import weights
from etude.common.blobs import Store
from etude.common.errors import StoreError, UnavailableError
from etude.common.weights import VersionId
from etude.inference import metrics
from etude.inference.engine.interface import PolicyEngine

NEVER_AUDITED = VersionId(0, 0)
"""Version before the first audit: all samples of the process are suspect."""

REPORT_ATTEMPTS = 10
REPORT_RETRY_S = 1.0
"""Attempts to report damaged memory before the process ends without a report."""

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Auditor:
    """Compares the live words of one engine with their expected state digest."""

    engine: PolicyEngine
    store: Store
    instance: str
    """This process, as the spans of its tokens name it."""
    every: int
    """Versions between two audits."""
    suspect_since: VersionId | None = None
    """Set once an audit found damage: the version of the last one that did not."""
    _sound: VersionId = NEVER_AUDITED
    _activations: int = 0

    async def count_activation(self, *, is_first: bool) -> None:
        """Count an activation; audit the first one, then every `every`-th.

        Raises:
            UnavailableError: as audit().
        """
        self._activations += 1
        if is_first or self._activations % self.every == 0:
            await self.audit()

    async def audit(self) -> None:
        """Scan the live words.

        Raises:
            UnavailableError: their digest is wrong; the engine must end.
        """
        sound = await self.engine.swap.audit()
        metrics.WEIGHTS_AUDIT.labels("sound" if sound else "damaged").inc()
        if sound:
            self._sound = self.engine.live or NEVER_AUDITED
        else:
            self.suspect_since = self._sound
            await self._report_suspect()
            raise UnavailableError(f"engine: {self.engine.failed}")

    async def _report_suspect(self) -> None:
        """Exclude all samples of this process since its last sound audit from training.

        The record must outlive the process: an unreachable store is retried for 10 s.
        """
        for attempt in range(REPORT_ATTEMPTS):
            try:
                await asyncio.to_thread(
                    weights.mark_suspect,
                    self.store,
                    self.instance,
                    since=self._sound,
                    message=self.engine.failed,
                )
            except StoreError as error:
                log.error("attempt %d to report damaged memory failed: %s", attempt + 1, error)  # noqa: TRY400 - it says all
                await asyncio.sleep(REPORT_RETRY_S)
            else:
                return
