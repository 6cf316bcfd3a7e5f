"""S3 servers for tests: an emulator in this process, and MinIO in its own."""

import os
import runpy
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

from tests.support.free_ports import reserve_port

ROOT = Path(__file__).parents[3]
BUCKET = "etude"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "etude-test", "AWS_SECRET_ACCESS_KEY": "etude-test-secret"}
"""The same for every server, so that several may be used at once."""
START_S = 60.0
"""MinIO takes 0.7 s on an idle machine; a busy one gets patience."""


@contextmanager
def moto() -> Iterator[str]:
    """An emulator's endpoint."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 - 1 s, for tests without S3 too

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def minio_binary() -> Path:
    """Where `make minio` puts the server; it may not be there."""
    found = runpy.run_path(str(ROOT / "hack" / "minio.py"))["binary"]()
    assert isinstance(found, Path)
    return found


@dataclass(slots=True)
class MinioServer:
    """A server on a port and a folder of its own; both outlive a stop, as a machine's would."""

    folder: Path
    port: int = field(default_factory=reserve_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            RuntimeError: it ended, with its last words.
            TimeoutError: it does not answer.
        """
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        environment = dict(
            os.environ,
            MINIO_ROOT_USER=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            MINIO_ROOT_PASSWORD=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            MINIO_BROWSER="off",
            MINIO_UPDATE="off",
        )
        words = (str(minio_binary()), "server", "--quiet", str(data))
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                (*words, "--address", f"127.0.0.1:{self.port}"),
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline_s = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError((self.folder / "log").read_text()[-2000:])
            if time.monotonic() > deadline_s:
                self.stop()
                raise TimeoutError(f"MinIO did not answer within {START_S:.0f} s")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it as a power cut would: what it acknowledged must be there afterwards."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        # Its own health check says yes a moment before requests do: ask as a stranger instead.
        try:
            with urllib.request.urlopen(self.endpoint, timeout=1):
                return True
        except HTTPError as error:
            return error.code == HTTPStatus.FORBIDDEN
        except OSError:
            return False
