"""Entry point of the operator: reads its settings and serves."""

import asyncio
import sys
from collections.abc import Coroutine, Iterator

from etude.common.errors import EtudeError
from etude.common.process import read_settings, start_process
from etude.operator.settings import Settings


def main() -> None:
    """Run the operator until SIGTERM."""
    start_process()
    settings = read_settings("etude-operator", Settings.from_env)
    from etude.operator.service import serve  # kopf and the API client arrive here

    sys.exit(serve_to_exit_code(serve(settings)))


def serve_to_exit_code(serving: Coroutine[None, None, None]) -> int:
    """Serve until the end; returns the exit code. Known errors print one line."""
    code = 0
    try:
        asyncio.run(serving)
    except* EtudeError as caught:  # a task group wraps errors of its tasks
        code = 1
        for error in _flatten(caught):
            sys.stderr.write(f"etude-operator: {error}\n")
    return code


def _flatten(caught: BaseExceptionGroup[EtudeError]) -> Iterator[EtudeError]:
    for error in caught.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flatten(error)
        else:
            yield error
