"""Ray nodes on one machine that share nothing but its network: each has a /tmp of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ALONE = (
    "--node-manager-port=0 --object-manager-port=0 --metrics-export-port=0"
    " --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0"
    " --object-store-memory=100000000 --include-log-monitor=false"
)
"""Options that win over those before them: all nodes here would have the same ports."""

START_ATTEMPTS = 5
"""Of a node, which Ray gives 30 s: a busy machine needs more."""

BIN = Path(sys.executable).parent

IN_TMP = 'mount --bind "$0" /tmp && echo mounted && exec sleep infinity'


@dataclass(slots=True)
class RayNode:
    """A mount namespace whose /tmp is a folder that no other node sees, and the Ray in it."""

    folder: Path
    """What the node has for /tmp, as seen from outside."""
    address: str
    """IP address, one of the loopback network."""
    env: Mapping[str, str]
    """Of its processes, beside that of the tests."""
    _anchor: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self._anchor = subprocess.Popen(
            ("unshare", "--mount", "sh", "-c", IN_TMP, str(self.folder)),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._anchor.stdout is not None
        if self._anchor.stdout.readline() != "mounted\n":
            raise RuntimeError(f"no mount namespace: unshare ended with {self._anchor.wait()}")

    def start_ray(self, command: str) -> None:
        """Start Ray; returns once it has joined its cluster.

        Args:
            command: a shell's, that starts with `ray start`.

        Raises:
            RuntimeError: Ray failed again and again.
        """
        words = f"exec {command} --node-ip-address={self.address} {ALONE}"
        for _ in range(START_ATTEMPTS):
            start = self.run(("sh", "-c", words), log="ray.log", PATH=f"{BIN}:{os.environ['PATH']}")
            if start.wait() == 0:
                return
            self.kill_all()  # Ray gives a node 30 s, and leaves what it has started
        raise RuntimeError((self.folder / "ray.log").read_text()[-2000:])

    def run(self, command: Sequence[str], *, log: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a process on the node."""
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                ("nsenter", f"--mount=/proc/{self._anchor.pid}/ns/mnt", *command),
                env={**os.environ, "HOME": "/tmp", "TMPDIR": "/tmp", **self.env, **env},
                stdout=output,
                stderr=output,
            )

    def kill_raylet(self) -> None:
        """Kill -9 the process that makes this a node of the cluster."""
        (raylet,) = (pid for pid in self._pids() if _program(pid) == "raylet")
        os.kill(raylet, signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill every process of the node."""
        for pid in self._pids():
            if pid != self._anchor.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill every process of the node, and the namespace with the last of them."""
        self.kill_all()
        self._anchor.kill()
        self._anchor.wait()

    def _pids(self) -> list[int]:
        mine = _namespace(self._anchor.pid)
        pids = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
        return [pid for pid in pids if _namespace(pid) == mine]


def _namespace(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/mnt").readlink())
    except OSError:  # it ended meanwhile
        return None


def _program(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return None
