"""A command's process: it drops its privileges, then runs the command."""

import atexit
import builtins
import fcntl
import gc
import importlib
import math
import os
import resource
import signal
import sys
import termios
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from etude.agent import minitest
from etude.envserver.drivers.process import seccomp
from etude.envserver.egress import proxy_variables
from etude.envserver.isolation import sandbox_layout, syscalls
from etude.envserver.isolation.sandbox_layout import SandboxJob

FILTER = seccomp.program()


def become_command(job: SandboxJob, streams: Sequence[int], proc: int) -> NoReturn:
    """Turn this forked process into the job's command; never returns."""
    status = 126
    try:
        _leave_privileges(streams, proc)
        _limit(job)
        os.chdir(sandbox_layout.WORKSPACE)
        if job.is_terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        syscalls.drop_capabilities()
        syscalls.install_filter(FILTER)
        if job.argv:
            status = _exec_program(job)
        elif (way := sandbox_layout.parse_warm_command(job.command)) is None:
            _exec_shell(job)
        else:
            os.environ.update({**_egress(job), **job.env})
            status = _run_warm(way)
    except BaseException:  # noqa: BLE001 - the last line of the process
        traceback.print_exc()
    finally:
        os._exit(status)


def _leave_privileges(streams: Sequence[int], proc: int) -> None:
    os.setsid()
    for target, source in enumerate(streams):
        os.dup2(source, target)
    if os.getuid() != sandbox_layout.INSIDE_UID:
        os.setgroups([])
        os.setresgid(
            sandbox_layout.INSIDE_UID, sandbox_layout.INSIDE_UID, sandbox_layout.INSIDE_UID
        )
        os.setresuid(
            sandbox_layout.INSIDE_UID, sandbox_layout.INSIDE_UID, sandbox_layout.INSIDE_UID
        )
        syscalls.set_dumpable(to=True)
    # Its own user namespace, so that its processes are counted separately.
    syscalls.unshare(syscalls.NEW_USER, "unshare the user of a command")
    identity = f"{sandbox_layout.INSIDE_UID} {sandbox_layout.INSIDE_UID} 1"
    for name, text in (("setgroups", "deny"), ("uid_map", identity), ("gid_map", identity)):
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
    os.closerange(3, 1024)


def _limit(job: SandboxJob) -> None:
    for limit, value in (
        (resource.RLIMIT_NPROC, job.limits.processes),
        (resource.RLIMIT_NOFILE, job.limits.open_files),
        (resource.RLIMIT_FSIZE, job.limits.file_bytes),
        (resource.RLIMIT_AS, job.limits.address_bytes),
        (resource.RLIMIT_CORE, 0),
        # Threads may use every core for the whole timeout.
        (resource.RLIMIT_CPU, math.ceil(job.timeout_s * (os.cpu_count() or 1)) + 1),
    ):
        resource.setrlimit(limit, (value, value))


def _exec_program(job: SandboxJob) -> int:
    """Become the program, or report why not and return a shell's exit code."""
    _reset_signals()
    name = job.cwd
    try:
        os.chdir(job.cwd or ".")
        name = job.argv[0]
        environment = {**sandbox_layout.ENVIRONMENT, **_egress(job), **job.env}
        os.execvpe(name, list(job.argv), environment)  # noqa: S606 - the purpose
    except OSError as error:
        os.write(2, f"{name}: {error.strerror}\n".encode("utf-8", "replace"))
        return 127 if isinstance(error, FileNotFoundError) else 126


def _reset_signals() -> None:
    # Python ignores the first two, and a background process of a script the others; a shell's
    # children expect them to end a process.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def _exec_shell(job: SandboxJob) -> NoReturn:
    _reset_signals()
    environment = {**sandbox_layout.ENVIRONMENT, **_egress(job), **job.env}
    os.execve("/bin/sh", ["sh", "-c", job.command], environment)  # noqa: S606 - the purpose


def _egress(job: SandboxJob) -> Mapping[str, str]:
    return proxy_variables.VARIABLES if job.has_egress else {}


def _run_warm(way: sandbox_layout.WarmCommand) -> int:
    # Other processes of the same user may not read a grader's memory.
    syscalls.set_dumpable(to=False)
    gc.enable()
    importlib.invalidate_caches()
    status = run_file(way.file) if way.file else minitest.main(Path(sandbox_layout.WORKSPACE))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status


def run_file(path: str) -> int:
    """Do what `python3 PATH` does, in this interpreter, and return the exit code."""
    file = Path(path).absolute()
    try:
        code = compile(file.read_bytes(), file, "exec", dont_inherit=True)
    except OSError as error:
        what = f"[Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"python3: can't open file {str(file)!r}: {what}\n")
        return 2
    except (SyntaxError, ValueError):
        traceback.print_exc(limit=0)
        return 1
    main = ModuleType("__main__")
    vars(main).update(
        __file__=str(file), __builtins__=builtins, __annotations__={}, __cached__=None
    )
    sys.modules["__main__"] = main
    sys.argv = [path]
    sys.path.insert(0, str(file.parent))
    try:
        exec(code, vars(main))  # noqa: S102 - running the file is the purpose
        status = 0
    except SystemExit as error:
        status = _exit_code(error)
    except BaseException as error:  # noqa: BLE001 - the code under test may raise anything
        inner = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(error.with_traceback(inner))
        status = 1
    _wait_for_threads()
    atexit._run_exitfuncs()
    return status


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
