"""The inference role as a run of chaos starts it: the real one, on a faulty store and observed.

python -m tests.harness.chaos.engines.role SETTINGS WHO, with the environment that the role reads.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tests.harness.chaos import spawning, stores
from tests.harness.chaos.engines.mutations import MUTATIONS
from tests.harness.chaos.journal import Journal
from tests.harness.chaos.settings import Settings
from tests.harness.chaos.stores import ChaosStore, faulty

from etude.common import role_inputs
from etude.common.errors import CorruptError
from etude.common.weights import VersionId
from etude.inference import main
from etude.inference.engine import build as engine_build
from etude.inference.settings import EngineOptions
from etude.inference.swap.coordinator import SwapCoordinator
from etude.inference.updates import updater

RENEW_S = 0.5
BURST = 0.004
"""An engine calls its store far less often than the whole of a longer chain does."""


def to_file(settings: Settings, path: Path) -> None:
    """What a role's process is told."""
    fields = {name: getattr(settings, name) for name in settings.__slots__}
    path.write_text(json.dumps({**fields, "folder": str(settings.folder)}))


def _from_file(path: Path) -> Settings:
    fields = json.loads(path.read_text())
    return Settings(**{**fields, "folder": Path(fields["folder"])})


def _observe(engine: Any, journal: Journal, store: ChaosStore) -> None:
    from tests.harness.chaos.engines.observer import Observer  # noqa: PLC0415 - imports torch

    core = engine.llm.engine_core._core
    model = core.model_executor.driver_worker.worker.model_runner.get_model()
    Observer(core, model, journal).watch()
    relabel = engine.relabel

    async def told(version: VersionId, *, drop_cache: bool) -> None:
        asked = store.asked.pop(version.epoch + 1, None)
        journal.write("live", version=str(version), asked=asked)
        await relabel(version, drop_cache=drop_cache)

    engine.relabel = told


def _tell_refusals(journal: Journal) -> None:
    prepare = SwapCoordinator.prepare

    async def talking(self: SwapCoordinator, *args: Any, **kwargs: Any) -> int:
        try:
            return await prepare(self, *args, **kwargs)
        except CorruptError as error:
            journal.write("refused", reason=error.reason, text=str(error)[:300])
            raise

    SwapCoordinator.prepare = talking  # type: ignore[method-assign] # of this process only


def _start(settings: Settings, who: str) -> None:
    spawning.end_with_parent()
    if settings.mutation:
        MUTATIONS[settings.mutation].apply()
    updater.LEASE_RENEWAL_S, stores.BURST = RENEW_S, BURST
    journal = settings.journal(who)
    store = faulty(settings, who, journal)

    async def build(options: EngineOptions, stop: asyncio.Event) -> Any:
        engine = await engine_build.build_engine(options, stop)
        if engine is not None:
            _observe(engine, journal, store)
        return engine

    _tell_refusals(journal)
    role: Any = main
    role.build_engine = build
    # The role's own wiring asks here, once vLLM has been imported.
    shared: Any = role_inputs
    shared.store_for = lambda _uri, _storage: store
    main.main()


if __name__ == "__main__":
    _start(_from_file(Path(sys.argv[1])), sys.argv[2])
