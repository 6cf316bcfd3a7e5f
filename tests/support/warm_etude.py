"""`etude` in a process of its own for each command, split off from one that has imported it.

An import costs half a second of a core, more than most verbs: tests that type many commands pay
it once. A command gets its own arguments, folder, environment and streams, and ends as a process
does. What is about the start itself (another encoding, a terminal) starts Python anew.
"""

import atexit
import contextlib
import gc
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
STREAMS = ("stdin", "stdout", "stderr")
LIMIT_S = 120.0
_servers: list["subprocess.Popen[bytes]"] = []


def etude(
    *words: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    text: str = "",
    limit_s: float = LIMIT_S,
) -> "subprocess.CompletedProcess[str]":
    """Run one command to its end, as subprocess.run does.

    Raises:
        TimeoutExpired: it takes longer; it is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder, name)) for name in STREAMS}
        Path(files["stdin"]).write_text(text)
        given = os.environ if env is None else env
        told = {"words": words, "cwd": str(cwd or Path.cwd()), "env": {**given}, **files}
        code = _ask(told, limit_s)
        if code is None:
            raise subprocess.TimeoutExpired(words, limit_s)
        said = [Path(files[name]).read_text() for name in STREAMS[1:]]
        return subprocess.CompletedProcess(words, code, *said)


def _ask(request: Mapping[str, Any], limit_s: float) -> int | None:
    server = _servers[0] if _servers else _start()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request).encode() + b"\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], limit_s)[0]:
        _stop()
        return None
    line = server.stdout.readline()
    assert line, "the process that commands are split off from has ended"
    return int(line)


def _start() -> "subprocess.Popen[bytes]":
    # Nothing that a library reads when it is imported may be the tests' own.
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    made = subprocess.Popen(
        [sys.executable, "-c", "from tests.support.warm_etude import serve; serve()"],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    _servers.append(made)
    atexit.register(_stop)
    return made


def _stop() -> None:
    while _servers:
        server = _servers.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 9)
        server.wait()


def _words() -> Sequence[str]:
    """Split a process off for each request; returns in those, and exits when there are no more."""
    answers = os.dup(1)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.close(answers)
            _become(request)
            words: Sequence[str] = request["words"]
            return words
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    sys.exit(0)


def _become(request: Mapping[str, Any]) -> None:
    """Take on the streams, the folder and the environment of a command."""
    reading, writing = os.pipe()
    data = Path(request["stdin"]).read_bytes()
    assert len(data) < select.PIPE_BUF * 16, "more than a pipe holds"
    os.write(writing, data)
    os.close(writing)
    os.dup2(reading, 0)
    os.close(reading)
    for number, name in enumerate(STREAMS[1:], start=1):
        with Path(request[name]).open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the old one has read ahead
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])


def serve() -> NoReturn:
    """Be the process that commands are split off from."""
    # What most verbs import when they are called.
    from etude.cli import environments  # noqa: F401, PLC0415
    from etude.cli.main import main  # noqa: PLC0415
    from etude.cli.weights import version_names  # noqa: F401, PLC0415
    from etude.common import weights  # noqa: F401, PLC0415
    from etude.common.api import yaml_documents  # noqa: F401, PLC0415
    from etude.common.api.lint import linter  # noqa: F401, PLC0415
    from etude.common.blobs import conformance  # noqa: F401, PLC0415
    from etude.common.rpc import channels  # noqa: F401, PLC0415
    from etude.v1 import environments_pb2_grpc  # noqa: F401, PLC0415

    # Else the end of each process would look at all objects of this one, and copy their pages.
    gc.freeze()
    sys.argv = ["-c", *_words()]
    main()
    sys.exit(0)
