"""Sandbox server: a warm interpreter that forks once per command.

Processes: the host starts this program, which enters a new user namespace (a helper writes its
map), then all other namespaces, and forks process 1 of them: the server. When the host dies, the
server's channel closes, the server ends, and the kernel ends every process below it.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass, field
from typing import Any, NoReturn

from etude.agent import minitest
from etude.envserver.drivers.process import root_filesystem, supervisor
from etude.envserver.isolation import sandbox_layout, syscalls
from etude.envserver.isolation.sandbox_layout import SandboxJob, SandboxPaths

_OUT_OF_MEMORY_FIRST = b"500"
_MAX_DESCRIPTORS = 4
"""Standard input, output, error and the control of a program."""


def main(arguments: list[str]) -> NoReturn:
    """Serve on the socket descriptor arguments[0]; its first message is the layout."""
    channel = socket.socket(fileno=int(arguments[0]))
    paths = SandboxPaths(**json.loads(channel.recv(sandbox_layout.MAX_REQUEST_BYTES)))
    os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [entry for entry in sys.path if entry.startswith(paths.prefix)]
    try:
        syscalls.require_machine()
        sandbox_layout.require_safe_user()
        _enter_user_namespace()
        rest = syscalls.NEW_MOUNTS | syscalls.NEW_PIDS | syscalls.NEW_NETWORK
        syscalls.unshare(rest | syscalls.NEW_IPC | syscalls.NEW_HOSTNAME, "unshare")
        server = os.fork()
        if server == 0:
            _serve(channel, has_proc=root_filesystem.build_root(paths))
    except OSError as error:
        refusal = {"refused": [error.errno, str(error)]}
        channel.send(json.dumps(refusal).encode())
        os._exit(1)
    channel.close()
    _, status = os.waitpid(server, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _enter_user_namespace() -> None:
    """Become root of a new user namespace; commands are another user in it, where we may.

    Raises:
        PermissionError: namespaces are allowed here, but user maps are not.
    """
    uid, gid = os.geteuid(), os.getegid()
    ready, is_ready = os.pipe()
    helper = os.fork()
    if helper == 0:
        # Closes its copy of the other end, so that it sees the end of a parent that is refused.
        os.close(is_ready)
        _write_maps(os.getppid(), uid, gid, ready)
    syscalls.unshare(syscalls.NEW_USER, "unshare user")
    os.write(is_ready, b"1")
    if os.waitpid(helper, 0)[1] != 0:
        raise PermissionError(1, "cannot write the user map of a new user namespace")
    os.close(ready)
    os.close(is_ready)


def _write_maps(process: int, uid: int, gid: int, ready: int) -> NoReturn:
    status = 1
    try:
        if os.read(ready, 1):
            for name, text in _maps(uid, gid).items():
                file = os.open(f"/proc/{process}/{name}", os.O_WRONLY)
                os.write(file, text.encode())
                os.close(file)
            status = 0
    finally:
        os._exit(status)


def _maps(uid: int, gid: int) -> dict[str, str]:
    inside, other = sandbox_layout.INSIDE_UID, sandbox_layout.OUTSIDE_UID
    if sandbox_layout.has_other_user():
        both = f"0 0 1\n{inside} {other} 1"
        return {"uid_map": both, "gid_map": both}
    return {"setgroups": "deny", "uid_map": f"{inside} {uid} 1", "gid_map": f"{inside} {gid} 1"}


@dataclass(slots=True)
class _Server:
    """Forks a supervisor for each request, and reports those that died without a report."""

    channel: socket.socket
    has_proc: bool
    own_pids: int
    own_network: int
    running: dict[int, SandboxJob] = field(default_factory=dict)
    networks: dict[str, int] = field(default_factory=dict)
    """Network namespaces of leases with a job that others can connect to."""

    def serve(self) -> NoReturn:
        wake, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poller = select.poll()
        for descriptor in (self.channel.fileno(), wake):
            poller.register(descriptor, select.POLLIN)
        self._send({"ready": True})
        while True:
            events = dict(poller.poll())
            if wake in events:
                os.read(wake, 4096)
                self._reap()
            if self.channel.fileno() in events:
                message, descriptors, _, _ = socket.recv_fds(
                    self.channel, sandbox_layout.MAX_REQUEST_BYTES, _MAX_DESCRIPTORS
                )
                if not message:
                    os._exit(0)
                self._obey(json.loads(message), descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)

    def _obey(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "kill" in message:
            for process, job in self.running.items():
                if job.job_id == message["kill"]:
                    os.kill(process, signal.SIGKILL)
        else:
            self._start(sandbox_layout.decode_job(message), descriptors)

    def _start(self, job: SandboxJob, descriptors: list[int]) -> None:
        try:
            if job.shares_network and job.lease not in self.networks:
                self.networks[job.lease] = self._new_network(job)
            syscalls.unshare(syscalls.NEW_PIDS, "unshare the processes of a command")
            process = os.fork()
            if process == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                shared = supervisor.SharedNamespaces(self.has_proc, self.networks.get(job.lease))
                supervisor.supervise(job, self.channel, descriptors, shared)
            self.running[process] = job
        except OSError as error:
            self._send({"job_id": job.job_id, "refused": str(error)})
        finally:
            # Only processes forked between the two calls are in the new namespace.
            syscalls.enter_namespace(self.own_pids, syscalls.NEW_PIDS)

    def _reap(self) -> None:
        while self.running:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            job = self.running.pop(process, None)
            if job is not None and status != 0:
                refused = "the command's supervisor was killed"
                self._send({"job_id": job.job_id, "refused": refused})
            if job is not None and job.shares_network:
                self._leave_network(job.lease)

    def _new_network(self, job: SandboxJob) -> int:
        try:
            syscalls.unshare(syscalls.NEW_NETWORK, "unshare the network of a lease")
            syscalls.loopback_up()
            if job.has_egress:
                supervisor.announce(self.channel, job)
            return os.open(f"{sandbox_layout.PRIVATE_PROC}/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            syscalls.enter_namespace(self.own_network, syscalls.NEW_NETWORK)

    def _leave_network(self, lease: str) -> None:
        if not any(job.lease == lease and job.shares_network for job in self.running.values()):
            os.close(self.networks.pop(lease))
            self._send({"left": lease})

    def _send(self, message: dict[str, object]) -> None:
        self.channel.send(json.dumps(message).encode())


def _serve(channel: socket.socket, *, has_proc: bool) -> NoReturn:
    _volunteer_for_oom()
    own_pids, own_network = (
        os.open(f"{sandbox_layout.PRIVATE_PROC}/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        for name in ("pid", "net")
    )
    # All forks share what a first run loads and specialises: 100 page copies less for each.
    minitest.run(
        {"test_warm.py": b"def test_pass():\n    pass\n\ndef test_fail():\n    assert 0\n"}
    )
    gc.collect()
    gc.freeze()
    gc.disable()
    _Server(channel, has_proc, own_pids, own_network).serve()


def _volunteer_for_oom() -> None:
    """Make a sandbox the kernel's first choice when memory runs out."""
    file = os.open(f"{sandbox_layout.PRIVATE_PROC}/self/oom_score_adj", os.O_WRONLY)
    os.write(file, _OUT_OF_MEMORY_FIRST)
    os.close(file)
