"""Lending of a channel's engine: users and rollouts sample on it in turns, never together."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from etude.common.demand import WINDOW_S, DemandPeak
from etude.common.errors import ForbiddenError, UnavailableError
from etude.common.tls.identity import TRAINER, Identity
from etude.inference import metrics
from etude.v1 import weights_pb2

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class LendingState(Enum):
    """Callers who may sample on the engine."""

    SERVING = weights_pb2.LENDING_STATE_SERVING
    """Users, at the version of the channel."""
    EMPTYING = weights_pb2.LENDING_STATE_EMPTYING
    """Nobody new: it is lent once the users' turns that run have ended."""
    LENT = weights_pb2.LENDING_STATE_LENT
    """Rollouts, at the newest version of the run."""
    RETURNING = weights_pb2.LENDING_STATE_RETURNING
    """Nobody, until the version of the channel is live again."""


@dataclass(slots=True)
class LendingControl:
    """State of one engine, and the turns of users that it runs.

    A gateway lends for some seconds and repeats that: an engine that none reaches any more comes
    back.
    """

    borrower: str = ""
    """Name of the run that samples while the engine is lent; empty if it never is."""
    window_s: float = WINDOW_S
    """Time after which a turn of a user no longer counts as demand."""
    state: LendingState = LendingState.SERVING
    user_turns: int = 0
    on_change: Callable[[], None] = field(default=lambda: None)
    """Called when another version may have to be live."""
    _peak: DemandPeak = field(default_factory=DemandPeak)
    _started_s: float = field(default_factory=time.monotonic)
    _until_s: float = -math.inf
    """End of the loan."""
    _recalled_s: float = -math.inf
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when rollouts have to go, and replaced."""

    @property
    def is_lent(self) -> bool:
        """True while the run's newest version is served, and not the channel's."""
        return self.state is LendingState.LENT

    def lend(self, seconds: float, *, now_s: float) -> None:
        """Lend the engine for some time from now on, or longer if it is lent already."""
        self._until_s = now_s + seconds
        if self.state in {LendingState.SERVING, LendingState.RETURNING}:
            self._change(LendingState.EMPTYING)
            self._lend_if_empty()

    def recall(self, *, now_s: float) -> None:
        """Take the engine back: rollouts end here, and go on elsewhere."""
        if self.state is LendingState.EMPTYING:
            self._change(LendingState.SERVING)
        elif self.state is LendingState.LENT:
            self._recalled_s = now_s
            self._change(LendingState.RETURNING)
            self._ended.set()
            self._ended = asyncio.Event()

    def expire(self, *, now_s: float) -> None:
        """Take the engine back if it was not lent again in time."""
        if now_s >= self._until_s:
            self.recall(now_s=now_s)

    def confirm_returned(self, *, now_s: float) -> None:
        """Let users sample again, as the version of the channel is live."""
        if self.state is LendingState.RETURNING:
            metrics.LENDING_RETURN_SECONDS.observe(now_s - self._recalled_s)
            self._change(LendingState.SERVING)

    def refuse_other_run(self, caller: Identity | None, *, is_rollout: bool) -> None:
        """Refuse a trainer that is not the borrower's, or that calls as a user would.

        Raises:
            ForbiddenError: it is none of those that may.
        """
        if caller is None or caller.role != TRAINER:
            return
        if not (is_rollout and self.borrower and caller.run == self.borrower):
            raise ForbiddenError(f"{caller.uri} may not sample here: the engine is lent to others")

    @contextlib.contextmanager
    def admit(self, *, is_rollout: bool) -> Iterator[None]:
        """Count a call while it runs.

        Raises:
            UnavailableError: the engine is not there for it now.
        """
        wanted = LendingState.LENT if is_rollout else LendingState.SERVING
        if self.state is not wanted:
            what = "rollouts" if is_rollout else "users"
            raise UnavailableError(f"takes no turns of {what}: it is {self.state.name.lower()}")
        if is_rollout:
            yield
            return
        self.user_turns += 1
        self._peak.record(self.user_turns, now_s=time.monotonic())
        try:
            yield
        finally:
            self.user_turns -= 1
            self._lend_if_empty()

    async def until_recalled(self, pieces: AsyncGenerator[_T, None]) -> AsyncGenerator[_T, None]:
        """Pass on what a rollout's call gives, until the engine is taken back.

        Raises:
            UnavailableError: it was.
        """
        ended = asyncio.create_task(self._ended.wait(), name="recalled")
        piece: asyncio.Future[_T] | None = None
        try:
            while True:
                piece = asyncio.ensure_future(anext(pieces))
                await asyncio.wait({piece, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not piece.done():
                    raise UnavailableError("is taken back for users")
                try:
                    given = piece.result()
                except StopAsyncIteration:
                    return
                yield given
        finally:
            ended.cancel()
            if piece is not None:
                piece.cancel()
                await asyncio.wait({piece})

    def write_status(self, status: weights_pb2.WeightStatus, *, now_s: float) -> None:
        """Write state and load into a status on the wire."""
        status.lending = self.state.value
        status.user_turns = self.user_turns
        peak = self._peak.highest(now_s=now_s, window_s=self.window_s)
        status.user_turns_peak = max(self.user_turns, peak)
        status.observed_seconds = now_s - self._started_s

    def _lend_if_empty(self) -> None:
        if self.state is LendingState.EMPTYING and not self.user_turns:
            self._change(LendingState.LENT)

    def _change(self, state: LendingState) -> None:
        log.info("lending: %s, was %s", state.name.lower(), self.state.name.lower())
        self.state = state
        metrics.LENDING_LENT.set(self.is_lent)
        self.on_change()
