"""One run from an empty store to a judgement."""

import logging
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.harness.chaos.conductor import Outage, StuckError
from tests.harness.chaos.faults import FaultyRun
from tests.harness.chaos.result import Result
from tests.harness.chaos.settings import Settings
from tests.harness.chaos.sweep import sweep
from tests.harness.chaos.verdict import judge
from tests.support.stores import s3_servers
from typing_extensions import override

from etude.cli.buckets import make_bucket
from etude.common.errors import EtudeError

_NOT_KEPT = shutil.ignore_patterns("server", "scratch", "checkpoints")


@dataclass(slots=True)
class Marked(Outage):
    """An outage that every process looks for in a file."""

    file: Path

    @override
    def stop(self) -> None:
        self.file.touch()

    @override
    def start(self) -> None:
        self.file.unlink(missing_ok=True)


@dataclass(slots=True)
class _Place:
    url: str
    endpoint: str | None = None
    server: s3_servers.MinioServer | None = None


@contextmanager
def _place(store: str, folder: Path) -> Iterator[_Place]:
    if store == "folder":
        yield _Place(f"file://{folder}/store")
        return
    url = f"s3://{s3_servers.BUCKET}/chaos"
    if store == "moto":
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
        with s3_servers.moto() as endpoint:
            make_bucket(url, endpoint=endpoint)
            yield _Place(url, endpoint)
        return
    server = s3_servers.MinioServer(folder)
    server.start()
    try:
        make_bucket(url, endpoint=server.endpoint)
        yield _Place(url, server.endpoint, server)
    finally:
        server.stop()


def run(
    store: str, *, versions: int, seed: int = 0, mutation: str = "", keep: Path | None = None
) -> Result:
    """Run the chain on a store: folder, moto or minio.

    Args:
        store: on which.
        versions: how many are published, at least.
        seed: of the weights and the faults.
        mutation: which check is broken.
        keep: where journals and ledger are copied to, for looking into a failure.
    """
    # Before the first process: all are forked from one server, which keeps its environment.
    os.environ.update(s3_servers.CREDENTIALS)
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as name,
        _place(store, Path(name) / "server") as place,
    ):
        settings = Settings(
            folder=Path(name),
            url=place.url,
            endpoint=place.endpoint,
            seed=seed,
            versions=versions,
            mutation=mutation,
        )
        return _run(settings, store, place, keep)


def _run(settings: Settings, store: str, place: _Place, keep: Path | None) -> Result:
    settings.checkpoints.mkdir()
    outage: Outage = place.server or Marked(settings.down)
    conductor = FaultyRun(settings, settings.raw_store(), outage)
    began, unrecovered = time.monotonic(), []
    try:
        conductor.run()
    except StuckError as error:
        unrecovered.append(str(error))
    finally:
        conductor.dismiss()
    seconds = time.monotonic() - began
    unrecovered += [f"{stray} is not on {conductor.home}" for stray in conductor.strays()]
    unrecovered += conductor.crew.crashes
    found = judge(settings, conductor.wrong_deltas)
    unrecovered += found.not_undone
    unrecovered += _left(conductor)
    if keep is not None:
        shutil.copytree(settings.folder, keep, dirs_exist_ok=True, ignore=_NOT_KEPT)
    return Result(
        store=store,
        versions=len(conductor.published),
        wanted=settings.versions,
        wrong_bits=found.wrong_bits,
        wrong_versions=found.wrong_versions,
        unrecovered=unrecovered,
        unexplained=found.unexplained,
        passes=found.passes,
        injected=Counter(conductor.injected) + found.faults,
        seen=Counter(conductor.seen) + found.seen,
        seconds=seconds,
        peak_rss_mib=found.peak_rss_mib,
        mutation=settings.mutation,
    )


def _left(conductor: FaultyRun) -> list[str]:
    try:
        left = sweep(conductor.raw)
    except (EtudeError, AssertionError) as error:
        return [f"sweep: {error}"]
    return [
        *(f"not referenced: {key}" for key in left.unreferenced),
        *(f"missing: {key}" for key in left.missing),
        *(f"leads elsewhere: {each}" for each in left.wrong),
    ]
