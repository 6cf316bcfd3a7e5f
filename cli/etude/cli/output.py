"""Output of every verb: streams, error messages and exit codes."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from typing_extensions import override

from etude.cli.hints import format_error, system_problem
from etude.common.errors import EtudeError, UserError


class Exit(IntEnum):
    """Stable exit codes, the same for every verb."""

    DONE = 0
    NO = 1
    """It ran, and the answer is no: the run failed, a check failed."""
    USAGE = 2
    NOT_FOUND = 3
    INVALID = 4
    FORBIDDEN = 5
    """The account may not do it."""
    UNREACHABLE = 6
    TIMED_OUT = 7
    """The awaited state did not come in time."""
    CONFLICT = 8
    BUG = 70
    INTERRUPTED = 130


CODES = {
    "NotFound": Exit.NOT_FOUND,
    "NotInstalled": Exit.NOT_FOUND,
    "Usage": Exit.USAGE,
    "Forbidden": Exit.FORBIDDEN,
    "TimedOut": Exit.TIMED_OUT,
    "Unreachable": Exit.UNREACHABLE,
    "Conflict": Exit.CONFLICT,
    "Internal": Exit.BUG,
}
"""By reason; every other problem is invalid input."""

_WIDEST = 10_000
"""Columns; a condition's sentence has 2,048 characters at most."""
_KEPT = "\t\n"
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that show text in another order than it has."""
_HARMLESS = (
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT}
    | {0x7F: 0x2421}
    | dict.fromkeys((*range(0x80, 0xA0), 0x2028, 0x2029, *_DIRECTIONS), 0xFFFD)
)
"""Characters that act on a terminal, and their visible replacements."""


def escape_controls(text: str) -> str:
    """Text of a store, a file or a user without characters that act on a terminal."""
    return text.translate(_HARMLESS)


class SafeConsole(Console):
    """Prints text literally: no markup, no names of emoji, no commands to the terminal.

    Colour needs a style or a rich Text.
    """

    def __init__(
        self,
        *,
        to_stderr: bool = False,
        width: int | None = None,
        record: bool = False,
        file: IO[str] | None = None,
    ) -> None:
        super().__init__(
            stderr=to_stderr,
            width=width,
            record=record,
            file=file,
            highlight=False,
            markup=False,
            emoji=False,
        )

    @override
    def render_str(self, text: str, **options: Any) -> Text:
        # Strings in tables are measured here and drawn here.
        return super().render_str(escape_controls(text), **options)

    @override
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, Text):
            shown = escape_controls(renderable.plain)
            if shown != renderable.plain:
                renderable = renderable.copy()
                renderable.plain = shown
        return super().render(renderable, options)


def console(*, to_stderr: bool = False) -> SafeConsole:
    """A console: data goes to stdout, everything else to stderr; NO_COLOR is honoured."""
    return SafeConsole(to_stderr=to_stderr)


def print_whole(picture: RenderableType) -> None:
    """Print a picture for people; in a file or a pipe it is as wide as it needs to be."""
    screen = console()
    if not screen.is_terminal:
        free = screen.options.update(width=_WIDEST)
        screen.width = max(screen.width, screen.measure(picture, options=free).maximum)
    screen.print(picture)


def print_row(row: object) -> None:
    """Print one JSON value on one line, for programs; non-ASCII text is escaped."""
    console().print(json.dumps(row), soft_wrap=True)


def say(text: str) -> None:
    """Print one line for people to stderr."""
    sys.stderr.write(escape_controls(text) + "\n")
    sys.stderr.flush()


@contextmanager
def exit_with_problem() -> Iterator[None]:
    """Turn our errors into three-part messages and exit codes, never into a stack trace.

    Raises:
        SystemExit: with the code that fits the error.
    """
    try:
        yield
    except EtudeError as error:
        raise SystemExit(say_problem(error)) from error
    except OSError as error:
        say(system_problem(error).text())
        raise SystemExit(Exit.NO) from error
    except KeyboardInterrupt as error:
        raise SystemExit(Exit.INTERRUPTED) from error


def say_problem(error: EtudeError) -> Exit:
    """Print one of our errors for people; returns the exit code that fits it."""
    if isinstance(error, UserError):
        say(error.problem.text())
        return CODES.get(error.problem.reason, Exit.INVALID)
    say(format_error(error))
    return Exit.NO
