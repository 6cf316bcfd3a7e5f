"""What a process is doing, on SIGUSR1: the stacks of its threads and of its asyncio tasks."""

import asyncio
import contextlib
import faulthandler
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def shown_on_signal() -> Iterator[None]:
    """SIGUSR1 writes all stacks to stderr; those of threads also while the event loop hangs."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, _show_tasks)
    # Registered last, so that it writes first and then hands the signal on to the loop.
    faulthandler.register(signal.SIGUSR1, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        loop.remove_signal_handler(signal.SIGUSR1)


def _show_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()
