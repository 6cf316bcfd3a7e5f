"""Answers of the learner ranks' actors, and the errors that they come with."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, NamedTuple

from ray.exceptions import RayError, RayTaskError

from etude.common.errors import EtudeError
from etude.trainer.export.receipts import PeerFailedError
from etude.trainer.learner.protocol import LearnerLostError

LOSS_NOTICE_S = 60.0
"""Longest time until Ray has seen that a node or process is gone: five checks, 3 s apart, of which
each may take some seconds; a rank that failed by itself is reported so much later."""

MAX_REASON = 1_000
"""Longest part of Ray's reason in a message."""


def unwrap_ray_error(error: BaseException) -> BaseException:
    """Unwrap the error that an actor raised; Ray puts the traceback into its message."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, BaseException) else error


async def gather_answers(references: Iterable[Awaitable[Any]], *, what: str) -> list[Any]:
    """Wait for the answers of all ranks to one call, in rank order.

    Raises:
        LearnerLostError: a rank died, with its node or alone; also if another rank noticed first.
        Exception: of a rank, as it raised it.
    """
    calls = [asyncio.ensure_future(each) for each in references]
    try:
        return await asyncio.gather(*calls)
    except RayError as error:
        cause = unwrap_ray_error(error)
        if isinstance(cause, PeerFailedError):
            cause = await _find_peer_error(calls) or cause
        loss = None if isinstance(cause, EtudeError) else await _find_loss(calls)
        if loss is None:
            raise cause from error
        raise LearnerLostError(f"learner rank {loss.rank} died in {what}: {loss.reason}") from error


async def _find_peer_error(calls: Sequence[asyncio.Future[Any]]) -> BaseException | None:
    """Error of the rank because of which the others failed; None if only they answer."""
    await asyncio.wait(calls, timeout=LOSS_NOTICE_S)
    errors = [call.exception() for call in calls if call.done() and not call.cancelled()]
    causes = [unwrap_ray_error(error) for error in errors if error is not None]
    own = (cause for cause in causes if not isinstance(cause, PeerFailedError))
    return next(own, None)


class _Loss(NamedTuple):
    """Loss of a rank."""

    rank: int
    reason: str


async def _find_loss(calls: Sequence[asyncio.Future[Any]]) -> _Loss | None:
    """Loss of a rank in whose absence a collective of another one failed; None if all live.

    Sockets report a dead peer immediately, Ray only when it sees that a process or node is gone.
    """
    pending = {call for call in calls if not call.done()}
    deadline_s = asyncio.get_running_loop().time() + LOSS_NOTICE_S
    while True:
        for rank, call in enumerate(calls):
            error = call.exception() if call.done() else None
            if isinstance(error, RayError) and not isinstance(error, RayTaskError):
                return _Loss(rank, " ".join(str(error).split())[:MAX_REASON])
        left_s = deadline_s - asyncio.get_running_loop().time()
        if not pending or left_s <= 0:
            return None
        _, pending = await asyncio.wait(
            pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
        )
