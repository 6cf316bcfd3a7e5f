"""How a command becomes the unprivileged process that it is."""

import atexit
import builtins
import gc
import importlib
import math
import os
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from etude.agent import minitest
from etude.envserver.drivers.sandbox import kernel, layout, seccomp
from etude.envserver.drivers.sandbox.layout import Job

FILTER = seccomp.program()
_LIMITS = (
    (resource.RLIMIT_NPROC, layout.PROCESSES),
    (resource.RLIMIT_NOFILE, layout.OPEN_FILES),
    (resource.RLIMIT_FSIZE, layout.FILE_BYTES),
    (resource.RLIMIT_AS, layout.MEMORY_BYTES),
    (resource.RLIMIT_CORE, 0),
)


def become(job: Job, output: int, proc: int) -> NoReturn:
    """Turn this forked process into the job's command; never returns."""
    status = 126
    try:
        _leave_privileges(output, proc)
        _limit(job.timeout_s)
        os.chdir(layout.WORKSPACE)
        kernel.drop_capabilities()
        kernel.install_filter(FILTER)
        way = layout.warm(job.command)
        if way is None:
            _shell(job.command)
        status = _warm(way)
    except BaseException:  # noqa: BLE001 - the last line of the process
        traceback.print_exc()
    finally:
        os._exit(status)


def _leave_privileges(output: int, proc: int) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    if os.getuid() != layout.INSIDE_UID:
        os.setgroups([])
        os.setresgid(layout.INSIDE_UID, layout.INSIDE_UID, layout.INSIDE_UID)
        os.setresuid(layout.INSIDE_UID, layout.INSIDE_UID, layout.INSIDE_UID)
        kernel.set_dumpable(to=True)
    # Its own user namespace, so that processes are counted for this command alone.
    kernel.unshare(kernel.NEW_USER, "unshare the user of a command")
    identity = f"{layout.INSIDE_UID} {layout.INSIDE_UID} 1"
    for name, text in (("setgroups", "deny"), ("uid_map", identity), ("gid_map", identity)):
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
    os.closerange(3, 1024)


def _limit(timeout_s: float) -> None:
    # Threads may use every core for as long as the command may take.
    cpu_s = math.ceil(timeout_s * (os.cpu_count() or 1)) + 1
    for limit, value in (*_LIMITS, (resource.RLIMIT_CPU, cpu_s)):
        resource.setrlimit(limit, (value, value))


def _shell(command: str) -> NoReturn:
    # Python ignores these two; a shell's children expect them to end a process.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execve("/bin/sh", ["sh", "-c", command], dict(layout.ENVIRONMENT))  # noqa: S606 - the purpose


def _warm(way: layout.Warm) -> int:
    # Other processes of the same user may not read a grader's memory.
    kernel.set_dumpable(to=False)
    gc.enable()
    importlib.invalidate_caches()
    status = run_file(way.file) if way.file else minitest.main(Path(layout.WORKSPACE))
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
