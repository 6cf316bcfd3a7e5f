"""The library that makes monitors such as can be forked: built where there is a compiler."""

import functools
import hashlib
import logging
import shutil
import subprocess
from pathlib import Path

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("stem.c")
_BUILD = ("-O2", "-shared", "-fPIC")
_LIMIT_S = 120.0


def library(folder: Path) -> Path | None:
    """The library, in a folder of the node's own; None where it cannot be built, as the log tells.

    Blocks for half a second when it was not built yet.
    """
    found = folder / f"stem-{_digest()}.so"
    if found.exists():
        return found
    compiler = shutil.which("cc")
    if compiler is None:
        log.warning("no machine is split off from a running one: there is no C compiler (cc)")
        return None
    partial = found.with_suffix(".partial")
    words = (compiler, *_BUILD, "-o", str(partial), str(SOURCE))
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if done.returncode != 0:
        log.warning("no machine is split off from a running one: %s", done.stderr[-500:].strip())
        return None
    # Its users are others than who builds it.
    partial.chmod(0o644)
    partial.rename(found)
    return found


@functools.cache
def _digest() -> str:
    made_of = repr(_BUILD).encode() + SOURCE.read_bytes()
    return hashlib.sha256(made_of).hexdigest()[:16]
