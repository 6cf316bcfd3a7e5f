"""Start and end of a process: logging, settings, exit codes, signals, stacks."""

import asyncio
import contextlib
import faulthandler
import linecache
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import NoReturn, TypeVar

from etude.common.errors import EtudeError, UserError

EXIT_TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: the store did not answer, and nothing else is wrong."""

EXIT_CONFIGURATION = 78
"""EX_CONFIG of sysexits.h: a restart would not help, so the operator does not retry."""

_Settings = TypeVar("_Settings")


def start_process() -> None:
    """Exit on an early SIGTERM, and log to stderr."""
    exit_on_sigterm()
    set_up_logging()


def set_up_logging() -> None:
    """Log to stderr, one line per message."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")


def read_settings(program: str, read: Callable[[], _Settings]) -> _Settings:
    """Read a process's settings; a missing or invalid one exits with EXIT_CONFIGURATION."""
    try:
        return read()
    except KeyError as error:
        exit_with(program, f"{error.args[0]} is not set", EXIT_CONFIGURATION)
    except ValueError as error:
        exit_with(program, str(error), EXIT_CONFIGURATION)


def run_service(
    program: str,
    service: Coroutine[None, None, None],
    *,
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a service until it returns; an error of a user or of the system exits with one line.

    So do several of its tasks that fail together; with an unknown error among them, all are raised.

    Args:
        program: named in the line.
        service: to run.
        make_loop: makes the event loop; unless given, it is asyncio's own.
    """
    try:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(service)
    except Exception as error:
        causes = list(root_causes(error))
        if not all(isinstance(each, OSError | EtudeError) for each in causes):
            raise
        user_errors = [each for each in causes if isinstance(each, UserError)]
        code = EXIT_CONFIGURATION if user_errors else 1
        exit_with(program, str((user_errors or causes)[0]), code)


def root_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of nested exception groups; one that is no group is its own."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from root_causes(each)
    else:
        yield error


def exit_with(program: str, message: str, code: int) -> NoReturn:
    """Print one line and exit."""
    sys.stderr.write(f"{program}: {message}\n")
    sys.exit(code)


def exit_on_sigterm() -> None:
    """Exit on SIGTERM, until another handler replaces this one.

    The kernel ignores it for the first process of a container that has no handler: a role that is
    terminated while it imports would start, and be killed only after its whole grace period.
    """
    signal.signal(signal.SIGTERM, _exit_by_signal)


def _exit_by_signal(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def shutdown_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set the event instead of killing the process; SIGUSR1 dumps its stacks."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        with dump_stacks_on_signal():
            yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def dump_stacks_on_signal() -> Iterator[None]:
    """SIGUSR1 writes all stacks to stderr; those of threads also while the event loop hangs."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, _dump_tasks)
    # Registered last, so that it writes first and then hands the signal on to the loop.
    faulthandler.register(signal.SIGUSR1, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        loop.remove_signal_handler(signal.SIGUSR1)


def _dump_tasks() -> None:
    for task in asyncio.all_tasks():
        sys.stderr.write(f"Stack for {task!r} (most recent call last):\n")
        for frame in task.get_stack():
            code = frame.f_code
            # A frame may stand at an instruction of no line, on which Task.print_stack() fails.
            number = frame.f_lineno or code.co_firstlineno
            sys.stderr.write(f'  File "{code.co_filename}", line {number}, in {code.co_name}\n')
            source = linecache.getline(code.co_filename, number).strip()
            sys.stderr.write(f"    {source}\n" if source else "")
    sys.stderr.flush()
