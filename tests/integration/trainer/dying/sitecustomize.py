"""Kills a Ray worker in the middle of an upload: Python runs this before anything else.

For a process whose PYTHONPATH names this folder. What a killed put to a folder leaves is a part of
the bytes under a name of its own; then the process is gone, as with kill -9 by somebody else.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlparse

DIES_AT = os.environ.get("ETUDE_TEST_DIES_AT", "")
"""Part of the key whose put is never finished."""
PEER_POLL_S = 0.05
PEER_POLLS = 1_200
"""A minute: the peer uploads at the same time, on a busy machine."""


def die_in_put() -> None:
    """From now on the put of such a key writes half of its bytes, and ends the process."""
    from etude.common.blobs.obstore_client import ObstoreStore  # noqa: PLC0415 - only in a Ray worker

    finished = ObstoreStore._put_once

    def put(self: ObstoreStore, key: str, content: memoryview) -> None:
        if DIES_AT in key:
            die(Path(urlparse(self.url).path) / f"{key}#1", content)
        finished(self, key, content)

    setattr(ObstoreStore, "_put_once", put)  # noqa: B010 - for the type checker it is a method


def die(staging: Path, content: memoryview) -> NoReturn:
    """Leave half of the bytes, and nothing that runs, once a peer's payload is whole.

    Raises:
        AssertionError: the process lives.
    """
    staging.parent.mkdir(parents=True, exist_ok=True)
    staging.write_bytes(content[: content.nbytes // 2])
    for _ in range(PEER_POLLS):
        if any("#" not in file.name for file in staging.parent.iterdir()):
            break
        time.sleep(PEER_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


if DIES_AT and any("default_worker" in argument for argument in sys.orig_argv):
    die_in_put()
