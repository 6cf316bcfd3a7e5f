"""The keeper's process: the real keeper of whatever epoch is open, told to spare nothing."""

import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from tests.harness.chaos import mutations
from tests.harness.chaos.publisher import retained
from tests.harness.chaos.settings import RUN, Settings
from tests.harness.chaos.stores import faulty
from typing_extensions import override

from etude.common.api.run.weights import Weights, WeightSettings
from etude.common.api.storage import Storage
from etude.common.blobs import Store
from etude.common.errors import EtudeError, FencedError
from etude.common.weights import VersionId, accepted_chain
from etude.common.weights.protocol.epochs import latest_epoch
from etude.trainer.compactor.compactor import Compactor, CompactorConfig

LOOK_S = 0.1
COLLECT_S = 0.4
"""Between two rounds of the collector: ten of them must outlast a reader's renewals."""
HESITATION_S = 0.2
WEIGHTS = Weights(
    keyframe_every_steps=12,
    advanced=WeightSettings(skips=(4, 16), retain_versions=2, retain_keyframes=1),
)

Doom = Callable[[VersionId], None]


class GreedyKeeper(Compactor):
    """Keeps what the checkpoints of this run need, and says what is about to go."""

    def __init__(self, settings: Settings, who: str, store: Store, epoch: int, doom: Doom) -> None:
        self._settings = settings
        self._doom = doom
        self._chance = random.Random(f"{settings.seed}/{who}/{epoch}")
        config = CompactorConfig(
            run=RUN,
            epoch=epoch,
            storage=Storage(uri=settings.url),
            folder=settings.folder / "scratch" / who,
            weights=WEIGHTS,
            collect_every_s=COLLECT_S,
            retry_s=0.1,
        )
        super().__init__(config, store=store)

    @override
    def _resume_versions(self) -> set[VersionId]:
        return set(retained(self._settings))

    @override
    def _collect_if_due(self) -> list[str]:
        """Looks before, and waits a little: for a reader to arrive in between."""
        if self._clock() >= self._collect_at:
            keys = set(self._collector._observe().deletable)
            going = [v for v in accepted_chain(self._store) if v.manifest_key in keys]
            if going:
                self._doom(going[-1])
                time.sleep(self._chance.uniform(0, HESITATION_S))
        return super()._collect_if_due()


def run(settings: Settings, who: str, link: Connection) -> None:
    """Round after round, until told to end."""
    mutations.apply(settings.mutation)
    journal = settings.journal(who)
    store = faulty(settings, who, journal)
    link.send(("ready", None))
    keeper: Compactor | None = None
    while not link.poll(LOOK_S):
        try:
            if keeper is None:
                keeper = _of_the_open_epoch(settings, who, store, link)
                continue
            report = keeper.run_round()
        except FencedError:
            keeper = None
            continue
        except EtudeError as error:
            journal.write("refused", reason=error.reason, text=str(error)[:300])
            continue
        for failure in report.failures:
            journal.write("refused", reason=failure.stage, text=failure.message[:300])
        for written in report.written:
            journal.write("folded", what=written.kind, version=str(written.target))
        if report.collected:
            settings.collected.write_text(str(time.monotonic()))


def _of_the_open_epoch(
    settings: Settings, who: str, store: Store, link: Connection
) -> Compactor | None:
    latest = latest_epoch(store)
    if latest is None:
        return None
    return GreedyKeeper(
        *(settings, who, store, latest.epoch), lambda version: link.send(("doomed", version))
    )
