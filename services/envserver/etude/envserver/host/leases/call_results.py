"""Results of a lease's calls, kept for clients that retry."""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from etude.agent.workspace import ExecResult
from etude.common.errors import ReusedIdError, WrongStateError
from etude.envserver.drivers.base import CommandOutcome
from etude.v1 import environments_pb2

MAX_TURN_BYTES = 3 << 20
"""Size of one turn's results; a message of the wire carries 4 MiB."""
MAX_STORED_BYTES = 4 << 20
"""Oldest results are dropped first, the newest turn's never."""

Digests = Mapping[str, str]
"""Digest by id of a call."""
KnownIds = Collection[str] | None
"""Ids of all calls that a client knows of; None if it does not say."""


@dataclass(slots=True)
class CallResults:
    """Results and digests of calls by id."""

    _kept: OrderedDict[str, environments_pb2.ToolResult] = field(default_factory=OrderedDict)
    _digests: dict[str, str] = field(default_factory=dict)
    _num_bytes: int = 0

    def check(self, digests: Digests, known: KnownIds = None) -> None:
        """Reject calls whose ids were used for other calls, and clients that have missed calls.

        Raises:
            ReusedIdError: an id was.
            WrongStateError: a call ran that is not among those known.
        """
        missed = set() if known is None else self._digests.keys() - set(known)
        if missed:
            raise WrongStateError(f"call {min(missed)!r} ran too, which the client does not know")
        for call_id, digest in digests.items():
            if self._digests.get(call_id, digest) != digest:
                raise ReusedIdError(f"call {call_id!r} was another call before")

    def has(self, call_id: str) -> bool:
        """True if the call has its result."""
        return call_id in self._kept

    def of(self, calls: Sequence[environments_pb2.ToolCall]) -> list[environments_pb2.ToolResult]:
        """The results of calls that have one, in order."""
        return [self._kept[call.call_id] for call in calls]

    def everything(self) -> environments_pb2.RunTurnResponse:
        """All results that are kept, the oldest first."""
        return environments_pb2.RunTurnResponse(results=self._kept.values())

    def digests(self) -> Digests:
        return dict(self._digests)

    def add(self, results: Sequence[environments_pb2.ToolResult], digests: Digests) -> None:
        """Keep the results of one turn."""
        self._digests.update(digests)
        for result in results:
            self._kept[result.call_id] = result
            self._num_bytes += len(result.content)
        while self._num_bytes > MAX_STORED_BYTES and len(self._kept) > len(results):
            call_id, oldest = self._kept.popitem(last=False)
            self._num_bytes -= len(oldest.content)
            self._digests.pop(call_id, None)


def call_digest(call: environments_pb2.ToolCall) -> str:
    """Digest of a call, without its id."""
    return blake3(f"{call.name}\0{call.arguments_json}".encode()).hexdigest(length=8)


def exec_result(outcome: CommandOutcome) -> ExecResult:
    """Result of a command for tools."""
    return ExecResult(
        output=outcome.output,
        exit_code=outcome.exit_code,
        timed_out=outcome.timed_out,
        ended_for=outcome.ended_for,
        cpu_ms=outcome.cpu_ms,
        dropped_bytes=outcome.dropped_bytes,
        dropped_lines=outcome.dropped_lines,
    )


def truncate_results(
    results: Sequence[environments_pb2.ToolResult],
) -> list[environments_pb2.ToolResult]:
    """Drop the content of results that do not fit into one turn."""
    left = MAX_TURN_BYTES
    for result in results:
        if len(result.content) > left:
            left = 0
            result.content = b"Error: the results of this turn are too long together"
            result.is_error, result.error = True, environments_pb2.TOOL_ERROR_KIND_TOOL
        left = max(0, left - len(result.content))
    return list(results)
