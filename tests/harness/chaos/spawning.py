"""Processes that start warm and never outlive the run."""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.harness.chaos.settings import Settings

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel end this process when the one that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _main(target: Callable[..., None], link: Connection, args: tuple[Any, ...]) -> None:
    end_with_parent()
    settings, who, *rest = args
    with (settings.folder / f"{who}.err").open("w") as file:
        os.dup2(file.fileno(), 2)  # told if the process should not have ended
    faulthandler.register(signal.SIGUSR1, file=2)  # told if it should have
    target(settings, who, link, *rest)


@dataclass(slots=True)
class Role:
    """A running process and the line to it."""

    who: str
    process: Any
    link: Connection
    killed: bool = False
    """Whether we ended it."""

    @property
    def pid(self) -> int:
        """Of the process."""
        found = self.process.pid
        assert isinstance(found, int)
        return found

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, or is stopped."""
        return bool(self.process.is_alive())


def start(target: Callable[..., None], settings: Settings, who: str, *args: object) -> Role:
    """Fork a role from a server that has imported and compiled everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.chaos.warm"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(target, theirs, (settings, who, *args)))
    process.start()
    theirs.close()
    return Role(who, process, ours)
