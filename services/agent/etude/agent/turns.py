"""Turn loop: the policy speaks, its calls run, it reads their results, until the work ends.

The same loop runs rollouts, whose policy is tokens of an engine, and conversations of users, whose
policy is behind a gateway.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import grpc
from opentelemetry import trace

from etude.agent.summaries import RECEIVED, SummarizeContext
from etude.agent.tool_calls import MalformedCall, ParsedCall, ToolCall
from etude.agent.tools.base import ErrorKind, Tool, ToolOutcome
from etude.agent.tools.terminal import Finish
from etude.agent.toolsets import Toolset
from etude.agent.trajectory import CallRecord, RolloutCosts, RolloutEnding, cut_text
from etude.common.errors import EtudeError, UnavailableError

_TRACER = trace.get_tracer("etude.agent")
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class RolloutEnvironment(Protocol):
    """The files and tools of one task."""

    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolOutcome]:
        """Results of one turn's calls, in call order."""
        ...


class PlatformFaultError(UnavailableError):
    """The sampler or the environment failed, not the policy: retry the rollout, never score it."""

    reason = "PlatformFault"


class PolicyTurn(NamedTuple):
    """One turn of the policy, as the loop reads it."""

    calls: Sequence[ParsedCall | MalformedCall]
    message: str
    """The text outside of calls."""
    is_cut: bool
    """True if its limit of tokens was reached: its calls are incomplete, and none runs."""


class PolicyConversation(Protocol):
    """The policy, with its conversation so far."""

    async def sample(self, turn: int) -> PolicyTurn:
        """Sample the next turn, numbered from 0.

        Raises:
            PlatformFaultError: the policy cannot be asked.
        """
        ...

    def append_results(self, outcomes: Sequence[ToolOutcome]) -> RolloutEnding | None:
        """Append the results of the last turn's calls; the ending if no room is left."""
        ...

    def append_request(self, outcomes: Sequence[ToolOutcome], request: str) -> RolloutEnding | None:
        """Append the results of the last turn's calls and the user's next request.

        Args:
            outcomes: none of a turn without calls.
            request: of the next step of a task.

        Returns:
            The ending if no room is left.
        """
        what = f"{type(self).__name__} has one request"
        raise NotImplementedError(what)

    def request_summary(self) -> None:
        """Let the policy sum up its context once it has read the results of its last calls."""
        what = f"{type(self).__name__} keeps one context"
        raise NotImplementedError(what)

    def note_last_results(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Take the results of calls after which the work ends: no turn of it reads them."""
        return  # most policies keep no record of them


class LaterSteps(Protocol):
    """Steps of a task behind its first, which begin when the policy ends the one before."""

    @property
    def is_last(self) -> bool:
        """True while no step follows."""
        ...

    async def begin_next(self) -> str | None:
        """End the step, and prepare the next; returns its request, None if it cannot begin.

        Raises:
            PlatformFaultError: the environment failed.
        """
        ...


@dataclass(slots=True)
class TurnLoop:
    """Turns of one piece of work, or of several steps in one environment."""

    policy: PolicyConversation
    environment: RolloutEnvironment
    tools: Toolset
    max_turns: int
    costs: RolloutCosts
    steps: LaterSteps | None = None
    records: list[CallRecord] = field(default_factory=list)
    final_message: str = ""
    _outcomes: Sequence[ToolOutcome] = ()
    """Results of the last turn's calls, which the policy has not read."""

    async def run(self) -> RolloutEnding:
        """Run turns until the work ends.

        Raises:
            PlatformFaultError: the policy or the environment failed.
        """
        for turn in range(self.max_turns):
            ending = await self._turn(turn)
            if ending is RolloutEnding.STOPPED and self.steps is not None:
                ending = await self._begin_step(self.steps, is_late=turn + 1 >= self.max_turns)
            if ending is not None:
                return ending
        return RolloutEnding.TURN_LIMIT

    async def _begin_step(self, steps: LaterSteps, *, is_late: bool) -> RolloutEnding | None:
        """Begin the next step; returns the ending if there is none, or no room for it."""
        if steps.is_last:
            return RolloutEnding.STOPPED
        if is_late:
            return RolloutEnding.TURN_LIMIT
        request = await steps.begin_next()
        if request is None:
            return RolloutEnding.STOPPED
        return self.policy.append_request(self._outcomes, request)

    async def _turn(self, turn: int) -> RolloutEnding | None:
        """Run one turn: a completion and its calls; returns the ending of the last turn."""
        spoken = await self.policy.sample(turn)
        self._outcomes = ()
        if spoken.is_cut or not spoken.calls:
            self.final_message = spoken.message
            return RolloutEnding.LENGTH_LIMIT if spoken.is_cut else RolloutEnding.STOPPED
        bound = self.tools.bind_turn(spoken.calls)
        outcomes = self._outcomes = await self._run(turn, spoken.calls, bound)
        self._record(turn, spoken.calls, outcomes)
        finish = _finish(bound)
        if finish is not None or turn + 1 >= self.max_turns:
            self.policy.note_last_results(outcomes)
        if finish is not None:
            self.final_message = finish.message or spoken.message
            return RolloutEnding.STOPPED
        if turn + 1 >= self.max_turns:
            return RolloutEnding.TURN_LIMIT
        if any(isinstance(tool, SummarizeContext) for tool in bound):
            self.policy.request_summary()
        return self.policy.append_results(outcomes)

    async def _run(
        self,
        turn: int,
        calls: Sequence[ParsedCall | MalformedCall],
        bound: Sequence[Tool | ToolOutcome],
    ) -> list[ToolOutcome]:
        """Results of all calls; only those that can run there are sent to the environment."""
        bound = [RECEIVED if isinstance(each, SummarizeContext) else each for each in bound]
        sent = [
            ToolCall(f"{turn}.{index}", call.name, to_json(call.arguments))
            for index, (call, tool) in enumerate(zip(calls, bound, strict=True))
            if isinstance(call, ParsedCall) and isinstance(tool, Tool)
        ]
        started = time.monotonic()
        answers = iter(await self._answers(sent) if sent else ())
        self.costs.tool_seconds += time.monotonic() - started
        return [each if isinstance(each, ToolOutcome) else next(answers) for each in bound]

    async def _answers(self, sent: Sequence[ToolCall]) -> Sequence[ToolOutcome]:
        with _TRACER.start_as_current_span("execute_tool") as span:
            span.set_attribute("gen_ai.operation.name", "execute_tool")
            span.set_attribute("gen_ai.tool.name", [call.name for call in sent])
            try:
                answers = await self.environment.run(sent)
            except (EtudeError, OSError, TimeoutError, grpc.RpcError) as error:
                raise PlatformFaultError(f"environment: {error}") from error
            if len(answers) != len(sent):
                raise PlatformFaultError(
                    f"environment: {len(answers)} results for {len(sent)} calls"
                )
        return answers

    def _record(
        self,
        turn: int,
        calls: Sequence[ParsedCall | MalformedCall],
        outcomes: Sequence[ToolOutcome],
    ) -> None:
        for call, outcome in zip(calls, outcomes, strict=True):
            record = _call_record(turn, call, outcome)
            self.costs.tool_calls += 1
            self.costs.malformed_calls += record.is_malformed
            self.records.append(record)


def _call_record(turn: int, call: ParsedCall | MalformedCall, outcome: ToolOutcome) -> CallRecord:
    arguments = call.arguments if isinstance(call, ParsedCall) else {"raw": cut_text(call.raw)}
    return CallRecord(
        turn=turn,
        name=call.name if isinstance(call, ParsedCall) else "",
        arguments_json=to_json(arguments),
        result=cut_text(outcome.content),
        is_error=outcome.is_error,
        is_malformed=outcome.kind is ErrorKind.INVALID,
    )


def _finish(bound: Sequence[Tool | ToolOutcome]) -> Finish | None:
    return next((tool for tool in bound if isinstance(tool, Finish)), None)


def to_json(arguments: Mapping[str, object]) -> str:
    """Arguments of a call as an environment is given them."""
    return _JSON.encode(arguments)
