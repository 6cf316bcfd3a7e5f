"""Experts of one request's tokens, read from the workers of an engine as they are recorded."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from etude.common.routed_experts import ExpertIds, RouteRows
from etude.inference.engine.interface import SampleRequest

CallWorkers = Callable[..., Awaitable[Sequence[Any]]]
"""Calls a method of every worker; answers in the order of ranks."""


@dataclass(slots=True)
class RouteReader:
    """Reads the experts of one request's tokens as they are recorded."""

    request: SampleRequest
    call: CallWorkers
    position: int
    """Of the next token whose experts are read."""

    @classmethod
    def of(cls, request: SampleRequest, call: CallWorkers) -> Self | None:
        """Reader of a request; None if it does not ask for experts."""
        return None if request.routes_from is None else cls(request, call, request.routes_from)

    async def read_new(self, num_tokens: int) -> RouteRows | None:
        """Read the experts of tokens that were not read before; None if there are none.

        Args:
            num_tokens: sampled so far. The newest of them has no experts yet.
        """
        found: ExpertIds | None
        found, *_ = await self.call("read_routes", self.request.request_id, self.position)
        num_rows = len(self.request.prompt_token_ids) + num_tokens - 1 - self.position
        if found is None or num_rows <= 0:
            return None
        rows = RouteRows(self.position, found[:num_rows])
        self.position = rows.end
        return rows

    async def forget(self) -> None:
        """Forget the experts of the request, which has ended."""
        await self.call("forget_routes", self.request.request_id)
