"""Certificate sidecar: renews a pod's certificate before it expires.

Run as `python -m etude.common.tls.sidecar`. The key is made here, stays in the pod's memory, and is
new with every certificate.
"""

import asyncio
import datetime
import logging
import os
import random
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from etude.common import process
from etude.common.backoff import Backoff
from etude.common.errors import EtudeError, UserError
from etude.common.probes import Probes
from etude.common.tls import material
from etude.common.tls.certificate_request import (
    CertificateRequest,
    IssuerError,
    request_certificate,
)
from etude.common.tls.material import CA, TlsMaterial, is_missing_authority, read_bundle

log = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
RENEW_AFTER = 2 / 3
"""Of a certificate's life: the rest is what an issuer may be away for."""
LOOK_S = 60.0
"""How often the CAs to believe are looked at; the kubelet brings changes about as often. So many
seconds lie between the first and the last pod that asks for such a change."""
SPREAD = 0.1
"""Of the time until a renewal, at random: pods that began together must not ask together."""
_RANDOM = random.Random()  # noqa: S311 - spreads requests, nothing secret depends on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Environment variables, read once."""

    folder: Path
    request: CertificateRequest
    host: str
    probe_port: int

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: naming a variable that is not set.
        """
        return cls(
            folder=Path(env["ETUDE_TLS_FOLDER"]),
            request=CertificateRequest(
                identity=env["ETUDE_TLS_IDENTITY"],
                issuer=env["ETUDE_TLS_ISSUER"],
                token=Path(env["ETUDE_TLS_TOKEN"]),
                trust=Path(env["ETUDE_TLS_TRUST"]),
            ),
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            probe_port=int(env["ETUDE_PROBE_PORT"]),
        )


def renewal_s(begins: datetime.datetime, ends: datetime.datetime, now: datetime.datetime) -> float:
    """Seconds until a certificate that was issued now should be replaced.

    A clock that is behind sees more life than there is: no more than all of it counts. On one that
    is far ahead it has ended already, and asking more often would change nothing.
    """
    left_s = min(ends - now, ends - begins).total_seconds()
    return max(FIRST_DELAY_S, RENEW_AFTER * left_s) if left_s > 0 else LONGEST_DELAY_S


def install_files(folder: Path, files: Mapping[str, bytes]) -> TlsMaterial:
    """Replace the files of a folder, all of them in one moment, as the kubelet does.

    Raises:
        UserError: they cannot be used; what was there stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Left by a sidecar that was killed while it wrote.
    _sweep(folder, but=(folder / "..data").resolve().name)
    fresh = folder / f"..{os.urandom(6).hex()}"
    # For the pod's group: a role's container may run as a user of its own. A guest's monitor has
    # neither.
    fresh.mkdir(mode=0o750)
    for name, data in files.items():
        (fresh / name).touch(mode=0o640)
        (fresh / name).write_bytes(data)
    shown = material.read_material(fresh)
    link = folder / "..data.new"
    link.unlink(missing_ok=True)
    link.symlink_to(fresh.name)
    link.replace(folder / "..data")
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    _sweep(folder, but=fresh.name)
    return shown


def _sweep(folder: Path, *, but: str) -> None:
    """Delete every folder with a key that is not in use."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name != but:
            shutil.rmtree(path, ignore_errors=True)


async def renew_until_stopped(settings: Settings, probes: Probes, stop: asyncio.Event) -> None:
    """Renew until the stop event is set."""
    backoff, again_s = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S), LOOK_S
    while not stop.is_set():
        trusted = _trusted(settings)
        try:
            wait_s = await renew(settings)
        except EtudeError as error:
            log.warning("%s; retry in %.0f s", error, backoff.delay_s)
            # Spread at random: a burst that was too much would be so again.
            wait_s = _spread(backoff.next_s())
        else:
            probes.ready = True
            backoff.reset()
            if _is_behind(settings, trusted):
                # Ever less often: one replica lags for a minute, or the CAs told to us are old.
                wait_s, again_s = min(wait_s, _spread(again_s)), 2 * again_s
            else:
                again_s = LOOK_S
        await _wait_for_renewal(settings, trusted, wait_s, stop)


def _is_behind(settings: Settings, trusted: bytes) -> bool:
    """Return true if the issuer does not know all CAs that this pod is told to trust.

    Then peers may refuse what it signed, and we what others signed.
    """
    named = (settings.folder / CA).read_bytes()
    if not is_missing_authority(named, trusted, datetime.datetime.now(datetime.UTC)):
        return False
    log.warning("%s leaves out a CA that is to be believed", settings.request.issuer)
    return True


def _spread(delay_s: float) -> float:
    return delay_s * (0.5 + _RANDOM.random())


async def _wait_for_renewal(
    settings: Settings, trusted: bytes, wait_s: float, stop: asyncio.Event
) -> None:
    """Wait until the renewal is due, or until shortly after the CAs to trust changed.

    Peers trust the CAs of their last answer: the sooner all renew, the sooner all know a new CA.
    """
    due_s = time.monotonic() + wait_s
    has_changed = False
    while (left_s := due_s - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(min(left_s, LOOK_S)):
                await stop.wait()
                return
        except TimeoutError:
            if not has_changed and _trusted(settings) != trusted:
                has_changed = True
                spread_s = LOOK_S * _RANDOM.random()
                due_s = min(due_s, time.monotonic() + spread_s)


def _trusted(settings: Settings) -> bytes:
    try:
        return read_bundle(settings.request.trust)
    except OSError:  # between two of its files
        return b""


async def renew(settings: Settings) -> float:
    """Seconds until the next time.

    Raises:
        IssuerError: nothing usable was had.
    """
    try:
        learned = (settings.folder / CA).read_bytes()
    except OSError:
        learned = b""
    files = await request_certificate(settings.request, learned)
    try:
        shown = install_files(settings.folder, files)
    except UserError as cause:
        raise IssuerError(f"{settings.request.issuer} answers nonsense: {cause}") from cause
    log.info("certificate of %s until %s", shown.identity.uri, shown.not_after)
    due_s = renewal_s(shown.not_before, shown.not_after, datetime.datetime.now(datetime.UTC))
    return due_s * (1 - SPREAD * _RANDOM.random())


async def serve(settings: Settings) -> None:
    """Keep the certificate fresh until SIGTERM."""
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    with process.shutdown_signals(stop):
        await probes.start()
        await renew_until_stopped(settings, probes, stop)
        await probes.stop()


def main() -> None:
    """Run the certificate sidecar."""
    process.start_process()
    settings = process.read_settings("certificates", Settings.from_env)
    process.run_service("certificates", serve(settings))


if __name__ == "__main__":
    main()
