"""Live display of a run: a picture on a terminal, lines anywhere else."""

import time
from collections.abc import Callable
from typing import Protocol

from rich.live import Live

from etude.cli.live import View, picture, plain
from etude.cli.output import console, say

REDRAWS_PER_SECOND = 2
PLAIN_INTERVAL_S = 10.0


class Viewing(Protocol):
    """Source of the present view of a run."""

    def view(self) -> View: ...


def show(viewer: Viewing, *, as_lines: bool, is_over: Callable[[], bool]) -> None:
    """Draw until the run is over, and once more after that."""
    screen = console()
    if as_lines or not screen.is_terminal:
        _show_lines(viewer, is_over)
        return
    with Live(console=screen, refresh_per_second=REDRAWS_PER_SECOND) as live:
        while not is_over():
            live.update(picture(viewer.view()))
            time.sleep(1 / REDRAWS_PER_SECOND)
        live.update(picture(viewer.view()))


def _show_lines(viewer: Viewing, is_over: Callable[[], bool]) -> None:
    shown = ""
    last = 0.0
    while not is_over():
        line = plain(viewer.view())
        if line != shown and time.monotonic() - last >= PLAIN_INTERVAL_S:
            say(line)
            shown, last = line, time.monotonic()
        time.sleep(0.5)
    say(plain(viewer.view()))
