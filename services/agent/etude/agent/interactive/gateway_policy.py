"""A policy behind a gateway: its conversation in the messages of OpenAI's chat completions.

The gateway owns the tokens. It is told the form of tools that the policy was trained with
(`x-etude-tool-format`), lists calls that do not parse in their places, and is sent every result
by the id of its call: so it renders what a training rollout renders, token for token.
"""

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from typing_extensions import override

from etude.agent.chat_exchange import ChatExchange, TurnAnswer, read_answer, read_wait
from etude.agent.tools.base import ToolOutcome
from etude.agent.toolsets import Toolset
from etude.agent.trajectory import RolloutEnding
from etude.agent.turns import PlatformFaultError, PolicyConversation, PolicyTurn
from etude.common.errors import Problem, UserError

ToolFormatName = Literal["Xml", "Native"]
"""As `rollout.toolFormat` of the run that trained the policy."""
CHAT = "/v1/chat/completions"
_ANSWER_S = 900.0
"""For one turn: a gateway ends turns earlier."""
_ATTEMPTS = 4
STOPPED = "Error: the work was stopped here; the call may have run"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayAddress:
    """A served model."""

    url: str
    model: str
    key: str = field(repr=False)
    """API key with the scope serve."""

    @property
    def chat_url(self) -> str:
        """URL of chat completions; the address may end in /v1 or not."""
        return f"{self.url.rstrip('/').removesuffix('/v1')}{CHAT}"


@dataclass(slots=True)
class GatewayPolicy(PolicyConversation):
    """The policy of one conversation."""

    address: GatewayAddress
    tools: Toolset
    tool_format: ToolFormatName
    max_turn_tokens: int
    temperature: float = 1.0
    rollout: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Named here: the gateway finds a conversation again by it."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    policy_version: str = ""
    """That sampled the last turn."""
    num_turns: int = 0
    """Turns of the rollout so far."""

    def __post_init__(self) -> None:
        is_native = self.tool_format == "Native"
        system = self.tools.native_prompt if is_native else self.tools.system_prompt
        self.messages.append({"role": "system", "content": system})

    @property
    def last_text(self) -> str:
        """Text of the policy's last turn; empty before the first."""
        said = (each for each in reversed(self.messages) if each["role"] == "assistant")
        newest = next(said, None)
        return "" if newest is None else str(newest.get("content") or "")

    def add_instruction(self, text: str) -> None:
        """Append what the user says, in place of an instruction that has no answer."""
        self._answer_open_calls()
        if self.messages[-1]["role"] == "user":
            self.messages.pop()
        self.messages.append({"role": "user", "content": text})

    @override
    async def sample(self, turn: int) -> PolicyTurn:
        answer = await self._ask()
        message = answer.message
        calls = message.get("tool_calls") or []
        kept: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
        if calls:
            kept["tool_calls"] = calls
        self.messages.append(kept)
        self.policy_version = answer.policy_version
        self.num_turns += 1
        is_cut = answer.finish_reason == "length"
        # Of a turn that was cut, no call runs: the loop ends.
        return PolicyTurn(
            [] if is_cut else answer.calls,
            message.get("content") or "",
            is_cut=is_cut,
        )

    @override
    def append_results(self, outcomes: Sequence[ToolOutcome]) -> RolloutEnding | None:
        calls = self.messages[-1]["tool_calls"]
        for call, outcome in zip(calls, outcomes, strict=True):
            self._append_result(call, outcome.content)
        return None

    @override
    def note_last_results(self, outcomes: Sequence[ToolOutcome]) -> None:
        # The next instruction of the user follows them.
        self.append_results(outcomes)

    def _append_result(self, call: Mapping[str, Any], content: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    def _answer_open_calls(self) -> None:
        """Answer the calls of a turn that was cut or stopped, whose results are unknown."""
        for call in self.messages[-1].get("tool_calls", ()):
            self._append_result(call, STOPPED)

    async def _ask(self) -> TurnAnswer:
        """Ask for one turn; again if the gateway is busy for now.

        Raises:
            PlatformFaultError: it does not answer.
            UserError: it refuses the request.
        """
        body: dict[str, Any] = {
            "model": self.address.model,
            "messages": self.messages,
            "tools": self.tools.schemas(),
            "temperature": self.temperature,
            "max_completion_tokens": self.max_turn_tokens,
        }
        request = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        attempt = 0
        while True:
            exchange = ChatExchange(self.address.chat_url, self._headers(), request, _ANSWER_S)
            status, headers, data = await exchange.run()
            if status == 200:
                return read_answer(headers, data)
            attempt += 1
            if status not in {429, 503} or attempt == _ATTEMPTS:
                _refuse(self.address, status, data)
            await asyncio.sleep(read_wait(headers, attempt))

    def _headers(self) -> Mapping[str, str]:
        return {
            "content-type": "application/json",
            "authorization": f"Bearer {self.address.key}",
            "x-etude-rollout": self.rollout,
            "x-etude-tool-format": self.tool_format,
        }


def _refuse(address: GatewayAddress, status: int, data: bytes) -> NoReturn:
    """Turn an answer other than 200 into an error.

    Raises:
        UserError: for what the user can correct.
        PlatformFaultError: for everything else.
    """
    try:
        what = str(json.loads(data)["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError, RecursionError):
        what = f"answered {status}"
    where = f"gateway {address.url}"
    if status in {401, 403}:
        fix = "set ETUDE_API_KEY to a key with the scope serve: etude-gateway key USER serve"
        raise UserError(Problem("Forbidden", what, where, fix))
    if status == 404:
        fix = f"ask for a served model: curl {address.url}/v1/models"
        raise UserError(Problem("NotFound", what, where, fix))
    if 400 <= status < 500 and status != 429:
        fix = "shorten the conversation, or start a new one"
        raise UserError(Problem("InvalidArgument", what, where, fix))
    raise PlatformFaultError(f"{where}: {what}")
