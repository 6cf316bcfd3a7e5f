"""A policy at an endpoint of OpenAI's chat completions, which gives text and no tokens.

The harness is that of any rollout: turn loop, tools, environment, limits. What needs tokens is
unknown and stays 0 in the costs; what the endpoint's own counts say is taken from them.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NoReturn

from typing_extensions import override

from etude.agent.chat_exchange import ChatExchange, TurnAnswer, read_answer, read_wait
from etude.agent.time_limit import time_limit
from etude.agent.token_policy import RolloutLimits, RolloutTask
from etude.agent.tool_calls import MalformedCall
from etude.agent.tools.base import ToolOutcome
from etude.agent.toolsets import Toolset
from etude.agent.trajectory import RolloutCosts, RolloutEnding, Trajectory
from etude.agent.turns import (
    PlatformFaultError,
    PolicyConversation,
    PolicyTurn,
    RolloutEnvironment,
    TurnLoop,
)
from etude.common.errors import Problem, UnavailableError, UserError
from etude.trainer.rollouts.outage import OutageBudget

MAX_REQUESTS = 256
"""Requests in flight; more wait."""
MAX_TURN_BYTES = 4 << 20
"""Longest answer: 131,072 tokens of many letters, and thinking of the same size."""
NUM_OPENING = 2
"""Messages before the first turn: system prompt and instruction."""
_LATER = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""States of an endpoint that is away or busy."""
_REFUSED = frozenset({401, 403, 404})
"""States that no rollout would change."""
_FULL = ("context_length_exceeded", "context length", "context window", "maximum context")
"""Words of an endpoint for a conversation that its model has no room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEndpoint:
    """A model at an endpoint."""

    url: str
    """Base URL, to which /chat/completions is added."""
    model: str
    key: str = field(default="", repr=False)
    """Bearer token; empty for none."""
    request_s: float = 600.0
    """Longest wait for one turn."""


class _ContextFullError(Exception):
    """The model has no room for the conversation."""


@dataclass(slots=True)
class EndpointClient:
    """Asks one endpoint for turns, over threads of its own."""

    endpoint: ChatEndpoint
    _has_answered: bool = False
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="endpoint")
    )

    async def ask(self, body: Mapping[str, Any], outage: OutageBudget) -> TurnAnswer:
        """Ask for one turn, again while the endpoint is away or busy: that time is an outage.

        Raises:
            UnavailableError: it gave no answer for the limit of the outage budget.
            PlatformFaultError: it refuses this conversation.
            UserError: it refuses all of them.
            _ContextFullError: its model has no room for the conversation.
        """
        headers = {"content-type": "application/json"}
        if self.endpoint.key:
            headers["authorization"] = f"Bearer {self.endpoint.key}"
        url = f"{self.endpoint.url.rstrip('/')}/chat/completions"
        request = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        attempt = 0
        while True:
            attempt += 1
            refusal: tuple[int, bytes] | None = None
            async with outage.count_outage(f"endpoint {self.endpoint.url}"):
                exchange = ChatExchange(
                    url,
                    headers,
                    request,
                    self.endpoint.request_s,
                    self._threads,
                    MAX_TURN_BYTES,
                )
                try:
                    async with asyncio.timeout(self.endpoint.request_s):
                        status, answered, data = await exchange.run()
                except TimeoutError as error:
                    raise UnavailableError("takes too long") from error
                if status == HTTPStatus.OK:
                    turn = read_answer(answered, data)
                    self._has_answered = True
                    return turn
                if status in _LATER:
                    await asyncio.sleep(read_wait(answered, attempt))
                    raise UnavailableError(f"answered {status}: {_error_text(data)}")
                refusal = status, data
            if refusal is not None:
                self._refuse(*refusal, is_first=len(body["messages"]) == NUM_OPENING)

    def _refuse(self, status: int, data: bytes, *, is_first: bool) -> NoReturn:
        text = _error_text(data)
        where = f"endpoint {self.endpoint.url}"
        is_full = any(words in text.lower() for words in _FULL)
        if is_full and not is_first:
            raise _ContextFullError
        # Of an endpoint that has answered before, the request is right and the conversation is not.
        if status in _REFUSED or not (self._has_answered or is_full):
            what = f"refuses model {self.endpoint.model} with status {status}: {text}"
            fix = "correct url, model or key of spec.endpoint"
            raise UserError(Problem("EndpointRefused", what, where, fix))
        raise PlatformFaultError(f"{where}: answered {status}: {text}")

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _error_text(data: bytes) -> str:
    """The endpoint's words about an error, in one line."""
    try:
        error = json.loads(data)["error"]
        text = f"{error.get('code') or ''} {error['message']}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = data[:2_000].decode("utf-8", "replace")
    return " ".join(text.split())[:300]


@dataclass(slots=True, kw_only=True)
class EndpointPolicy(PolicyConversation):
    """The policy of one rollout."""

    client: EndpointClient
    tools: Toolset
    limits: RolloutLimits
    task: RolloutTask
    outage: OutageBudget
    costs: RolloutCosts = field(default_factory=RolloutCosts)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    _num_tokens: int = 0
    """Of the transcript so far, as far as the endpoint counts them."""
    _num_counted: int = 0
    """Turns whose tokens it has counted."""

    def __post_init__(self) -> None:
        self.messages += [
            {"role": "system", "content": self.tools.native_prompt},
            {"role": "user", "content": self.task.instruction},
        ]

    @override
    async def sample(self, turn: int) -> PolicyTurn:
        started_s, lost_s = time.monotonic(), self.outage.lost_s
        try:
            answer = await self.client.ask(self._body(turn), self.outage)
        except _ContextFullError:
            return PolicyTurn((), "", is_cut=True)
        waited_s = time.monotonic() - started_s - (self.outage.lost_s - lost_s)
        self.costs.token_seconds += waited_s
        self.costs.turns += 1
        self._count_tokens(answer.usage)
        calls, text = answer.calls, answer.message.get("content") or ""
        is_cut = answer.finish_reason == "length"
        self._append_turn(text, answer.message.get("tool_calls") or [], calls)
        return PolicyTurn(() if is_cut else calls, text, is_cut=is_cut)

    @override
    def append_results(self, outcomes: Sequence[ToolOutcome]) -> RolloutEnding | None:
        for call, outcome in zip(self.messages[-1]["tool_calls"], outcomes, strict=True):
            result = {"role": "tool", "tool_call_id": call["id"], "content": outcome.content}
            self.messages.append(result)
        return RolloutEnding.LENGTH_LIMIT if self._num_tokens >= self.limits.max_tokens else None

    @override
    def append_request(self, outcomes: Sequence[ToolOutcome], request: str) -> RolloutEnding | None:
        ending = self.append_results(outcomes) if outcomes else None
        self.messages.append({"role": "user", "content": request})
        return ending

    def _append_turn(
        self, text: str, calls: Sequence[Mapping[str, Any]], parsed: Sequence[object]
    ) -> None:
        """Note the turn, without what only an endpoint's own form has, such as thinking."""
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            turn["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": _function(call, each)}
                for call, each in zip(calls, parsed, strict=True)
            ]
        self.messages.append(turn)

    def _body(self, turn: int) -> Mapping[str, Any]:
        body: dict[str, Any] = {
            "model": self.client.endpoint.model,
            "messages": self.messages,
            "tools": self.tools.schemas(),
            "temperature": self.task.temperature,
            "max_completion_tokens": self.limits.max_turn_tokens,
        }
        if self.task.seed is not None:
            # 31 bits: some servers take no more. One per turn, as engines get.
            body["seed"] = (self.task.seed * 1_000_003 + turn) % 2**31
        return body

    def _count_tokens(self, usage: Mapping[str, Any]) -> None:
        """Take the endpoint's counts; sampled tokens stay unknown if one turn has none."""
        prompt, sampled = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        self._num_tokens = max(self._num_tokens, prompt + sampled)
        self._num_counted += sampled > 0
        self.costs.completion_tokens += sampled
        if self._num_counted < self.costs.turns:
            self.costs.completion_tokens = 0


def _function(call: Mapping[str, Any], parsed: object) -> Mapping[str, str]:
    """The function of a call; servers refuse histories whose arguments are no JSON object."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(parsed, MalformedCall):
        arguments = json.dumps({"raw": parsed.raw})
    return {"name": function["name"], "arguments": arguments}


def _count(usage: Mapping[str, Any], name: str) -> int:
    found = usage.get(name)
    return found if type(found) is int and 0 <= found < 2**31 else 0


async def run_endpoint_rollout(
    policy: EndpointPolicy, environment: RolloutEnvironment
) -> Trajectory:
    """Run one rollout as `run_rollout` does; its trajectory has no tokens.

    Raises:
        PlatformFaultError: the endpoint or the environment failed.
        UserError: the endpoint refuses all conversations.
    """
    limits, costs = policy.limits, policy.costs
    steps = policy.task.steps
    loop = TurnLoop(policy, environment, policy.tools, limits.max_turns, costs, steps)
    try:
        async with time_limit(limits.timeout_s, paused_s=lambda: policy.outage.lost_s):
            ending = await loop.run()
    except TimeoutError:
        ending = RolloutEnding.TIME_LIMIT
    return Trajectory(
        links=(),
        costs=costs,
        ending=ending,
        final_message=loop.final_message,
        calls=tuple(loop.records),
    )
