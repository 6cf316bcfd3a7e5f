"""Preload library of fork servers, built where there is a C compiler."""

import functools
import hashlib
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from etude.envserver.drivers.vm.errors import VmmError

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("fork_server.c")
_BUILD = ("-O2", "-shared", "-fPIC")
_LIMIT_S = 120.0


def preload_library(folder: Path, *, limit_s: float = _LIMIT_S) -> Path | None:
    """Build the library in a folder of the host, or find it; None where it cannot be built.

    Building blocks for half a second. Concurrent calls are safe.

    Raises:
        VmmError: the compiler takes longer than the limit.
    """
    found = folder / f"stem-{_digest()}.so"
    if found.exists():
        return found
    compiler = shutil.which("cc")
    if compiler is None:
        log.warning("fork server is disabled: there is no C compiler (cc)")
        return None
    with tempfile.TemporaryDirectory(dir=folder, prefix="stem-") as name:
        partial = Path(name) / found.name
        words = (compiler, *_BUILD, "-o", str(partial), str(SOURCE))
        if not _build(words, limit_s):
            return None
        # It is used by other users.
        partial.chmod(0o644)
        partial.rename(found)
    return found


def _build(words: Sequence[str], limit_s: float) -> bool:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as cause:
        raise VmmError(f"{words[0]} takes longer than {limit_s:.0f} s for {SOURCE}") from cause
    if done.returncode != 0:
        log.warning("fork server is disabled: %s", done.stderr[-500:].strip())
    return done.returncode == 0


@functools.cache
def _digest() -> str:
    made_of = repr(_BUILD).encode() + SOURCE.read_bytes()
    return hashlib.sha256(made_of).hexdigest()[:16]
