"""Keeps a pod's certificate fresh: `python -m etude.common.tls.keeper`, beside its other processes.

The key is made here, lies in the pod's memory, and is new with every certificate.
"""

import asyncio
import datetime
import logging
import os
import random
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from etude.common.ending import end_at_once_when_told
from etude.common.errors import EtudeError, UserError
from etude.common.probes import Probes
from etude.common.serving import shutdown_signals
from etude.common.tls import material
from etude.common.tls.asking import IssuerError, Petition, obtained
from etude.common.tls.material import CA

log = logging.getLogger(__name__)

EXIT_CONFIGURATION = 78
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
RENEW_AFTER = 2 / 3
"""Of a certificate's life: the rest is what an issuer may be away for."""
SPREAD = 0.1
"""Of the time until a renewal, at random: pods that began together must not ask together."""
_RANDOM = random.Random()  # noqa: S311 - spreads requests, nothing secret depends on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Environment variables, read once."""

    folder: Path
    petition: Petition
    host: str
    probe_port: int

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """The settings, or what is wrong with them.

        Raises:
            KeyError: naming a variable that is not set.
        """
        return cls(
            folder=Path(env["ETUDE_TLS_FOLDER"]),
            petition=Petition(
                identity=env["ETUDE_TLS_IDENTITY"],
                issuer=env["ETUDE_TLS_ISSUER"],
                token=Path(env["ETUDE_TLS_TOKEN"]),
                trust=Path(env["ETUDE_TLS_TRUST"]),
            ),
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            probe_port=int(env["ETUDE_PROBE_PORT"]),
        )


def renewal_s(ends: datetime.datetime, now: datetime.datetime) -> float:
    """Seconds until a certificate that was issued now should be replaced."""
    return max(FIRST_DELAY_S, RENEW_AFTER * (ends - now).total_seconds())


def put(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace the files of a folder, all of them in one moment, as the kubelet does."""
    folder.mkdir(parents=True, exist_ok=True)
    before = (folder / "..data").resolve() if (folder / "..data").is_symlink() else None
    fresh = folder / f"..{os.urandom(6).hex()}"
    fresh.mkdir(mode=0o700)
    for name, data in files.items():
        (fresh / name).touch(mode=0o600)
        (fresh / name).write_bytes(data)
    link = folder / "..data.new"
    link.symlink_to(fresh.name)
    link.replace(folder / "..data")
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)


async def keep(settings: Settings, probes: Probes, stop: asyncio.Event) -> None:
    """Renew until told to stop."""
    delay_s = FIRST_DELAY_S
    while not stop.is_set():
        try:
            wait_s = await _renew(settings)
        except EtudeError as error:
            log.warning("%s; again in %.0f s", error, delay_s)
            wait_s, delay_s = delay_s, min(2 * delay_s, LONGEST_DELAY_S)
        else:
            probes.ready, delay_s = True, FIRST_DELAY_S
        try:
            async with asyncio.timeout(wait_s):
                await stop.wait()
        except TimeoutError:
            continue


async def _renew(settings: Settings) -> float:
    """Seconds until the next time.

    Raises:
        IssuerError: nothing usable was had.
    """
    try:
        learned = (settings.folder / CA).read_bytes()
    except OSError:
        learned = b""
    files = await obtained(settings.petition, learned)
    put(settings.folder, files)
    try:
        shown = material.read(settings.folder)
    except UserError as cause:
        raise IssuerError(f"{settings.petition.issuer} answers nonsense: {cause}") from cause
    log.info("certificate of %s until %s", shown.identity.uri, shown.not_after)
    due_s = renewal_s(shown.not_after, datetime.datetime.now(datetime.UTC))
    return due_s * (1 - SPREAD * _RANDOM.random())


async def serve(settings: Settings) -> None:
    """Keep the certificate fresh until SIGTERM."""
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    with shutdown_signals(stop):
        await probes.start()
        await keep(settings, probes, stop)
        await probes.stop()


def main() -> None:
    """Run as the pod's keeper."""
    end_at_once_when_told()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = Settings.from_env()
    except KeyError as error:
        sys.stderr.write(f"certificates: {error.args[0]} is not set\n")
        sys.exit(EXIT_CONFIGURATION)
    asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
