"""One chain with two real engines, from an empty store to a judgement."""

import asyncio
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.harness.chaos.engines import policy
from tests.harness.chaos.engines.schedule import KILLS
from tests.harness.chaos.engines.script import Script
from tests.harness.chaos.engines.site import Site, StuckError
from tests.harness.chaos.engines.verdict import judge
from tests.harness.chaos.result import Result
from tests.harness.chaos.settings import Settings

VERSIONS, QUICK_VERSIONS = 100, 12
LEAST = {
    **dict.fromkeys(KILLS, 1),
    **dict.fromkeys(("late engine", "store stopped", "flip at rest", "roll-back", "503 burst"), 1),
    **dict.fromkeys(("lost announce", "double announce", "old announce"), 5),
}
"""Fewer than this in a run of full length, and it has not shown what it must."""

_NOT_KEPT = shutil.ignore_patterns("store", "scratch", "checkpoints", "compiled", "exports")


def run(
    *,
    versions: int = VERSIONS,
    seed: int = 0,
    mutation: str = "",
    quick: bool = False,
    keep: Path | None = None,
) -> Result:
    """Run the chain on a folder.

    Args:
        versions: how many are published, at least.
        seed: of the weights and the faults.
        mutation: which check of the engines is broken.
        quick: whether to leave out all but a kill, an outage and a late engine.
        keep: where journals and ledger are copied to, for looking into a failure.
    """
    # Processes are started while calls run; gRPC would say each time that it noticed.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    with tempfile.TemporaryDirectory(prefix="chaos-engines-") as name:
        settings = Settings(
            folder=Path(name),
            url=(Path(name) / "store").as_uri(),
            seed=seed,
            versions=versions,
            mutation=mutation,
        )
        (settings.folder / "store").mkdir()
        settings.checkpoints.mkdir()
        policy.write_model(settings.folder / "model")
        try:
            return asyncio.run(_run(settings, quick=quick or bool(mutation)))
        finally:
            if keep is not None:
                shutil.copytree(settings.folder, keep, dirs_exist_ok=True, ignore=_NOT_KEPT)


async def _run(settings: Settings, *, quick: bool) -> Result:
    site = Site(settings, settings.raw_store())
    script, began, unrecovered = Script(site, quick=quick), time.monotonic(), []
    try:
        await script.run()
    except StuckError as error:
        unrecovered.append(str(error))
    else:
        unrecovered += _strays(site)
    finally:
        ended_wrongly = await site.close()
    unrecovered += ended_wrongly
    chain_s = time.monotonic() - began
    mismatches = [] if settings.mutation else [*script.comparison.mismatches()]
    found = judge(settings)
    least = {} if quick else LEAST
    return Result(
        store="engines",
        versions=len(site.published),
        wanted=settings.versions,
        wrong_bits=[*found.wrong_bits, *mismatches],
        wrong_versions=found.wrong_versions,
        unrecovered=[*unrecovered, *found.passes.not_undone, *found.answers.unanswered],
        unexplained=found.passes.unexplained,
        passes=found.passes.passes,
        injected=Counter(site.injected) + found.passes.faults,
        seen=Counter(site.seen) + found.passes.seen,
        seconds=time.monotonic() - began,
        peak_rss_mib=found.passes.peak_rss_mib,
        mutation=settings.mutation,
        least=least,
        figures={
            "chain_seconds": round(chain_s, 1),
            "answers": found.answers.number,
            "tokens": found.answers.tokens,
            "answers_across_swaps": found.answers.across_swaps,
            "states_said": found.states,
            "compared_with_fresh_engines": len(script.comparison.said),
            "late_engine_read": script.late_ways,
        },
    )


def _strays(site: Site) -> list[str]:
    home = site.published[-1]
    return [
        f"{engine.who} serves {engine.live}, not {home}"
        for engine in site.engines.values()
        if engine.live != home
    ]
