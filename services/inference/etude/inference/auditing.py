"""Audits of the live words, and what follows when memory is damaged."""

import asyncio
import logging
from dataclasses import dataclass

from etude.common import weights
from etude.common.blobs import Store
from etude.common.errors import StoreError, UnavailableError
from etude.common.weights import VersionId
from etude.inference import metrics
from etude.inference.policy import PolicyEngine

NEVER_SOUND = VersionId(0, 0)
"""Before the first audit: everything that the process sampled is in doubt."""

ACCUSATIONS = 10
ACCUSE_EVERY_S = 1.0
"""How often a process reports that its memory is damaged, before it ends anyway."""

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Auditor:
    """Compares the live words of one engine with what was promised of them."""

    engine: PolicyEngine
    store: Store
    instance: str
    """This process, as the spans of its tokens name it."""
    every: int
    """Versions between two audits."""
    suspect_since: VersionId | None = None
    """Set once an audit found damage: the version of the last one that did not."""
    _sound: VersionId = NEVER_SOUND
    _commits: int = 0

    async def committed(self, *, is_first: bool) -> None:
        """Count a commit; audit the first one, and then every so many.

        Raises:
            UnavailableError: as audit().
        """
        self._commits += 1
        if is_first or self._commits % self.every == 0:
            await self.audit()

    async def audit(self) -> None:
        """Scan the live words.

        Raises:
            UnavailableError: they are not what was promised; the engine must end.
        """
        sound = await self.engine.swap.audit()
        metrics.WEIGHTS_AUDIT.labels("sound" if sound else "damaged").inc()
        if sound:
            self._sound = self.engine.live or NEVER_SOUND
        else:
            self.suspect_since = self._sound
            await self._accuse()
            raise UnavailableError(f"engine: {self.engine.failed}")

    async def _accuse(self) -> None:
        """Have all that this process sampled since its last sound audit left out of training.

        The record outlives the process, which ends: a store that is away is given some time.
        """
        for attempt in range(ACCUSATIONS):
            try:
                await asyncio.to_thread(
                    weights.suspect,
                    self.store,
                    self.instance,
                    since=self._sound,
                    message=self.engine.failed,
                )
            except StoreError as error:
                log.error("attempt %d to report damaged memory: %s", attempt + 1, error)  # noqa: TRY400 - it says all
                await asyncio.sleep(ACCUSE_EVERY_S)
            else:
                return
