"""Supervisor of one command, the first process of its namespaces: mounts, limits, report."""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from etude.envserver.drivers.process import command, root_filesystem
from etude.envserver.drivers.process.access_log import AccessLog
from etude.envserver.egress import proxy_variables
from etude.envserver.isolation import sandbox_layout, syscalls
from etude.envserver.isolation.sandbox_layout import SandboxJob

_READ_BYTES = 1 << 18
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class HeadTailBuffer:
    """Head and tail of a stream of any length, in bounded memory."""

    head_bytes: int
    tail_bytes: int
    head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)
    _after_head: int = 0
    _lines: int = 0

    def add(self, data: bytes) -> None:
        room = self.head_bytes - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self._after_head += len(data)
        self._lines += data.count(b"\n")
        self._tail += data
        if len(self._tail) > 2 * self.tail_bytes + _READ_BYTES:
            del self._tail[: -self.tail_bytes or None]

    @property
    def total(self) -> int:
        return len(self.head) + self._after_head

    def result(self) -> tuple[bytes, int, int]:
        """Return head and tail, and the numbers of bytes and line ends between them."""
        tail = bytes(self._tail[-self.tail_bytes :]) if self.tail_bytes else b""
        dropped = self._after_head - len(tail)
        return bytes(self.head) + tail, dropped, self._lines - tail.count(b"\n")


class SharedNamespaces(NamedTuple):
    """Resources of a command that come from the server."""

    has_proc: bool
    """Whether it can have a /proc of its own."""
    network: int | None
    """Network namespace of its lease, if a job there shares it."""


def supervise(
    job: SandboxJob, channel: socket.socket, descriptors: Sequence[int], shared: SharedNamespaces
) -> NoReturn:
    """Run the job as process 1 of a new process namespace and send one report."""
    status = 1
    try:
        _send(channel, *_run(job, descriptors, shared, channel))
        status = 0
    except OSError as error:
        _send(channel, {"job_id": job.job_id, "refused": str(error)}, b"")
        status = 0
    finally:
        # Any other end is reported by the server, which sees the status.
        os._exit(status)


def _send(channel: socket.socket, header: dict[str, object], body: bytes) -> None:
    channel.send(json.dumps(header).encode() + b"\n" + body)


def _run(
    job: SandboxJob, descriptors: Sequence[int], shared: SharedNamespaces, channel: socket.socket
) -> tuple[dict[str, object], bytes]:
    started_s = time.monotonic()
    has_proc = shared.has_proc
    _prepare(job, shared, channel)
    log = AccessLog()
    if job.logs_accesses:
        log.open()
    if job.argv:
        *streams, control = descriptors
        watch = _Watch(job, _start(job, streams), control, log, has_proc=has_proc)
    else:
        output, write_end = os.pipe()
        null = os.open(os.devnull, os.O_RDONLY)
        child = _start(job, (null, write_end, write_end))
        watch = _Watch(job, child, output, log, has_proc=has_proc)
    status = watch.until_end()
    log.read()
    kept, dropped_bytes, dropped_lines = watch.kept.result()
    collected = _collect(job.collect) if job.collect else None
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    header = {
        "job_id": job.job_id,
        "exit_code": status,
        "timed_out": watch.timed_out,
        "ended_for": watch.ended_for,
        "output_bytes": len(kept),
        "dropped_bytes": dropped_bytes,
        "dropped_lines": dropped_lines,
        "has_collected": collected is not None,
        "accesses": log.result(),
        "accesses_complete": log.is_complete and job.logs_accesses,
        "cpu_ms": round(1000 * (usage.ru_utime + usage.ru_stime)),
        "wall_ms": round(1000 * (time.monotonic() - started_s)),
    }
    return header, kept + (collected or b"")


def announce(channel: socket.socket, job: SandboxJob) -> None:
    """Send the host a socket that listens in this network, for its egress proxy."""
    with syscalls.listener(proxy_variables.PORT, proxy_variables.BACKLOG) as made:
        whose = {"listening": "" if job.shares_network else str(job.job_id), "lease": job.lease}
        socket.send_fds(channel, [json.dumps(whose).encode()], [made.fileno()])


def _prepare(job: SandboxJob, shared: SharedNamespaces, channel: socket.socket) -> None:
    syscalls.unshare(syscalls.NEW_MOUNTS | syscalls.NEW_IPC, "unshare for a command")
    if shared.network is None:
        syscalls.unshare(syscalls.NEW_NETWORK, "unshare the network of a command")
        syscalls.loopback_up()
        if job.has_egress:
            announce(channel, job)
    else:
        syscalls.enter_namespace(shared.network, syscalls.NEW_NETWORK)
    syscalls.mount(
        f"{sandbox_layout.LEASES}/{job.workspace}", sandbox_layout.WORKSPACE, None, syscalls.BIND
    )
    if job.tests:
        syscalls.mount(
            f"{sandbox_layout.LEASES}/{job.tests}", sandbox_layout.TESTS, None, syscalls.BIND
        )
    flags, quarter = syscalls.NO_SUID | syscalls.NO_DEVICES, job.limits.temporary_bytes // 4
    owner = f"uid={sandbox_layout.INSIDE_UID},gid={sandbox_layout.INSIDE_UID},nr_inodes=16k"
    syscalls.mount(
        *("tmpfs", "/tmp", "tmpfs", flags),  # noqa: S108
        f"{owner},size={job.limits.temporary_bytes}",
    )
    syscalls.mount("tmpfs", sandbox_layout.LOGS, "tmpfs", flags, f"{owner},size={quarter}")
    syscalls.mount("tmpfs", "/dev/shm", "tmpfs", flags, f"{owner},size={quarter}")  # noqa: S108
    if shared.has_proc:
        root_filesystem.show_proc()


def _start(job: SandboxJob, streams: Sequence[int]) -> int:
    proc = os.open(sandbox_layout.PRIVATE_PROC, os.O_RDONLY | os.O_DIRECTORY)
    root_filesystem.hide_private()
    child = os.fork()
    if child == 0:
        command.become_command(job, streams, proc)
    for descriptor in {*streams, proc}:
        os.close(descriptor)
    return child


class _Watch:
    """Reads a command's output, or its control socket, and ends it when it breaks a limit."""

    def __init__(
        self, job: SandboxJob, child: int, source: int, log: AccessLog, *, has_proc: bool
    ) -> None:
        self._log = log
        self.kept = HeadTailBuffer(job.head_bytes, job.tail_bytes)
        self.timed_out = False
        self.ended_for = ""
        self._child = child
        self._is_control = bool(job.argv)
        self._source = source
        os.set_blocking(source, False)
        self._has_proc = has_proc
        self._memory_bytes = job.limits.memory_bytes
        self._interval_s = (
            sandbox_layout.PROGRAM_INTERVAL_S if job.argv else sandbox_layout.WATCH_INTERVAL_S
        )
        self._deadline_s = time.monotonic() + job.timeout_s
        self._kill_s = float("inf")
        self._look_s = time.monotonic() + self._interval_s

    def until_end(self) -> int:
        """Wait until every process of the command has ended; returns its exit code."""
        poller = select.poll()
        poller.register(self._source, select.POLLIN)
        exited = os.pidfd_open(self._child)
        poller.register(exited, select.POLLIN)
        while True:
            events = dict(poller.poll(1000 * self._patience_s()))
            if self._source in events and not self._read():
                poller.unregister(self._source)
            if exited in events:
                break
            self._enforce(time.monotonic())
        status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        _end_all()
        while self._read():
            pass
        return status if status >= 0 else 128 - status

    def _patience_s(self) -> float:
        """Time until the next check."""
        is_ending = self._kill_s < float("inf")
        left_s = self._deadline_s - time.monotonic()
        return (
            sandbox_layout.WATCH_INTERVAL_S
            if is_ending
            else max(0.001, min(self._interval_s, left_s))
        )

    def _read(self) -> bool:
        try:
            data = os.read(self._source, _READ_BYTES)
        except BlockingIOError:
            return False
        if self._is_control:
            self._obey(data)
        else:
            self.kept.add(data)
        return bool(data)

    def _obey(self, numbers: bytes) -> None:
        if not numbers:
            _signal_all(signal.SIGKILL)
        for number in numbers:
            # Before it has a group of its own, it is alone.
            for send in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    send(self._child, number)
                    break

    def _enforce(self, now_s: float) -> None:
        if now_s >= self._kill_s:
            _signal_all(signal.SIGKILL)
        elif self._kill_s < float("inf"):
            return
        elif now_s >= self._deadline_s:
            self.timed_out = True
            self._end("time")
        elif self.kept.total > sandbox_layout.FLOOD_BYTES:
            self._end("output")
        elif now_s >= self._look_s:
            self._look_s = now_s + self._interval_s
            self._look()

    def _look(self) -> None:
        self._reap()
        self._log.read()
        if self._has_proc and _resident_bytes(self._log) > self._memory_bytes:
            self._end("memory", grace_s=0)
        elif _free_disk_bytes() < sandbox_layout.FREE_DISK_BYTES:
            self._end("disk", grace_s=0)

    def _reap(self) -> None:
        """Reap orphans, which count as processes of the command until then."""
        while True:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            found = os.waitid(os.P_ALL, 0, flags)
            if found is None or found.si_pid == self._child:
                return
            os.waitpid(found.si_pid, 0)

    def _end(self, reason: str, grace_s: float = sandbox_layout.TERM_GRACE_S) -> None:
        self.ended_for = reason
        self._kill_s = time.monotonic() + grace_s
        _signal_all(signal.SIGTERM)


def _signal_all(number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)


def _end_all() -> None:
    """End all that a command left behind: the workspace must not change after the report."""
    _signal_all(signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _resident_bytes(log: AccessLog) -> int:
    """Resident memory of the command's processes, which the log gets the names of."""
    total = 0
    for name in os.listdir("/proc"):  # noqa: PTH208 - ten times the cost as Path objects
        if name.isdecimal() and name != "1":
            with contextlib.suppress(OSError), open(f"/proc/{name}/statm", "rb") as file:  # noqa: PTH123
                total += int(file.read().split()[1])
                log.add_program(_program(name))
    return total * _PAGE_BYTES


def _program(process: str) -> str:
    with open(f"/proc/{process}/comm", "rb") as file:  # noqa: PTH123 - as above
        return file.read().decode("utf-8", "replace").strip()


def _free_disk_bytes() -> int:
    found = os.statvfs(sandbox_layout.WORKSPACE)
    return found.f_bavail * found.f_frsize


def _collect(path: str) -> bytes | None:
    """Read a file that the command wrote: a small, regular file without links, or None."""
    here = os.open("/", os.O_PATH | os.O_DIRECTORY)
    *folders, name = path.strip("/").split("/")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        for folder in folders:
            here = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        file = os.open(name, flags, dir_fd=here)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > sandbox_layout.MAX_COLLECTED_BYTES:
            return None
        return os.read(file, sandbox_layout.MAX_COLLECTED_BYTES)
    except OSError:
        return None
