"""One conversation of a user with the agent: instructions, turns, and the events about them."""

import asyncio
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from etude.agent.interactive.consent import AgentState
from etude.agent.interactive.demonstrations import EditedSession
from etude.agent.interactive.edits import AppliedEdit, read_machine_time, tell_applied_edit
from etude.agent.interactive.gateway_policy import STOPPED, GatewayPolicy
from etude.agent.interactive.user_workspace import (
    REJECTED_COMMAND,
    REJECTED_EDIT,
    Approver,
    Decision,
    DecisionListener,
    Edit,
    open_user_workspace,
)
from etude.agent.local import LocalEnvironment
from etude.agent.search.codebase import Codebase
from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import ToolOutcome
from etude.agent.trajectory import RolloutCosts, RolloutEnding
from etude.agent.turns import PolicyConversation, PolicyTurn, RolloutEnvironment, TurnLoop
from etude.common.errors import EtudeError
from etude.common.feedback.client import EventClient, EventContext, hash_lines

_TESTS = re.compile(r"(?<![\w.])(\d{1,6}) (passed|failed|errors?)\b")
_COUNTS = {"passed": "numPassed", "failed": "numFailed", "error": "numErrored"}
_TEST_PROGRAM = re.compile(r"\b(?:pytest|unittest|minitest)\b")
_MAX_FOLLOWUP_CHARS = 16_000


def did_not_run(result: str) -> bool:
    """True for the recorded result of a call that its user rejected, or stopped."""
    if result in {STOPPED, f"Error: {REJECTED_COMMAND}"}:
        return True
    return result.startswith("Error: ") and result.endswith(f": {REJECTED_EDIT}")


class Screen(Protocol):
    """Shows a conversation to the user."""

    def show_message(self, text: str) -> None: ...
    def show_call(self, call: ToolCall, outcome: ToolOutcome) -> None: ...


@dataclass(slots=True)
class ConversationEvents(DecisionListener):
    """Events about one conversation; none without consent."""

    client: EventClient | None
    state: AgentState
    folder: Path
    policy: GatewayPolicy
    subject: str = field(default_factory=lambda: uuid.uuid4().hex)
    _ended_s: float | None = None
    """End of the last work, by the monotonic clock."""

    @property
    def turn(self) -> int:
        """Number of the policy's last turn."""
        return max(0, self.policy.num_turns - 1)

    def open_client(self) -> EventClient | None:
        """Open the client; None without consent, which another process may have taken back.

        Raises:
            UserError: the stored decision is damaged.
        """
        stored = self.state.read_consent() if self.client else None
        return self.client if stored is not None and stored.granted else None

    def add(self, kind: str, **payload: object) -> None:
        """Add an event about the last turn."""
        if client := self.open_client():
            client.add(kind, {"turn": self.turn, **payload}, self.context())

    @override
    def note_command(self, decision: Decision) -> None:
        """Tell of a command that was shown, and decided on; silence has no verdict."""
        self._note_decision(decision, num_lines=1)

    def _note_decision(self, decision: Decision, *, num_lines: int) -> None:
        self.add("shown", numLines=num_lines)
        if decision is not Decision.NOT_ASKED:
            self.add("accepted" if decision is Decision.ACCEPTED else "rejected")

    @override
    def note_edit(self, edit: Edit, decision: Decision) -> None:
        """Tell of an edit that was shown, decided on, and made or not."""
        client = self.open_client()
        if client is None:
            return
        self._note_decision(decision, num_lines=len(edit.diff))
        if decision is Decision.REJECTED:
            return
        stored = self.state.read_consent()
        if stored is not None and stored.demonstrations:
            session = EditedSession(
                str(self.folder), self.context(), self.turn, read_machine_time()
            )
            self.state.demonstrations.note_edit(session, edit.path, edit.before)
        if edit.is_deletion:
            return
        applied = AppliedEdit(
            edit=uuid.uuid4().hex,
            path=str(self.folder / edit.path),
            line_hashes=tuple(hash_lines(self.state.read_secret(), edit.new_lines)),
            made=read_machine_time(),
            about=self.context(),
        )
        tell_applied_edit(self.state.journal, client, applied, self.turn)

    def note_instruction(self, text: str) -> None:
        """Tell of the user's message; the first one of a conversation follows no turn."""
        if self._ended_s is not None:
            after_s = round(time.monotonic() - self._ended_s, 3)
            self.add("followup", text=text[:_MAX_FOLLOWUP_CHARS], afterS=after_s)

    def note_turn(self, outcome: str, *, wall_s: float, num_calls: int, num_broken: int) -> None:
        """Tell of a turn of the policy that is over."""
        self.add(
            "turn_ended",
            outcome=outcome,
            wallS=round(wall_s, 3),
            numToolCalls=num_calls,
            numBrokenToolCalls=num_broken,
        )

    def note_end(self) -> None:
        """Remember the end of the work on an instruction."""
        self._ended_s = time.monotonic()

    def note_tests(self, output: str) -> None:
        """Tell of tests that ran, if the output of a command says how they ended."""
        counts = dict.fromkeys(_COUNTS.values(), 0)
        found = _TESTS.findall(output[-2_000:])
        for number, word in found:
            counts[_COUNTS[word.rstrip("s") if word.startswith("error") else word]] = int(number)
        if found:
            self.add("test_result", **counts)

    def close(self, outcome: str) -> None:
        """Tell of the end of the task: Closed, Abandoned, Merged or Reverted."""
        client = self.open_client()
        if client is not None and self.policy.num_turns:
            client.add("task_closed", {"outcome": outcome}, self.context())

    def context(self) -> EventContext:
        """The conversation, as events name it."""
        return EventContext(self.subject, self.policy.rollout, self.policy.policy_version)


@dataclass(slots=True)
class _ObservedPolicy(PolicyConversation):
    """A policy whose turns are timed, shown and told of."""

    policy: GatewayPolicy
    events: ConversationEvents
    screen: Screen
    costs: RolloutCosts
    _started_s: float | None = None
    """Start of the turn that is not over."""
    _num_calls: int = 0
    _num_broken: int = 0
    """Of the turns before it."""

    @override
    async def sample(self, turn: int) -> PolicyTurn:
        self.end_turn()
        self._started_s = time.monotonic()
        spoken = await self.policy.sample(turn)
        if spoken.message.strip():
            self.screen.show_message(spoken.message)
            self.events.add("shown")
        return spoken

    @override
    def append_results(self, outcomes: Sequence[ToolOutcome]) -> RolloutEnding | None:
        return self.policy.append_results(outcomes)

    @override
    def note_last_results(self, outcomes: Sequence[ToolOutcome]) -> None:
        self.policy.note_last_results(outcomes)

    def end_turn(self, *, is_cancelled: bool = False) -> None:
        """Tell of the end of the last turn, once."""
        if self._started_s is None:
            return
        num_broken = self.costs.malformed_calls - self._num_broken
        outcome = "BrokenToolCall" if num_broken else "Completed"
        self.events.note_turn(
            "Cancelled" if is_cancelled else outcome,
            wall_s=time.monotonic() - self._started_s,
            num_calls=self.costs.tool_calls - self._num_calls,
            num_broken=num_broken,
        )
        self._num_calls, self._num_broken = self.costs.tool_calls, self.costs.malformed_calls
        self._started_s = None

    def drop_turn(self) -> None:
        """Forget a turn that failed: its end says nothing about the policy."""
        self._started_s = None


@dataclass(slots=True)
class _ObservedEnvironment(RolloutEnvironment):
    """Files of the user, or a copy of them, whose calls are shown and told of."""

    inner: RolloutEnvironment
    policy: _ObservedPolicy
    screen: Screen

    @override
    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolOutcome]:
        outcomes = await self.inner.run(calls)
        for call, outcome in zip(calls, outcomes, strict=True):
            self.screen.show_call(call, outcome)
            if call.name == "run_terminal" and _TEST_PROGRAM.search(call.arguments_json):
                self.policy.events.note_tests(outcome.content)
        return outcomes


@dataclass(slots=True)
class AgentSession:
    """A conversation about one folder."""

    policy: GatewayPolicy
    events: ConversationEvents
    environment: RolloutEnvironment
    """The folder itself, or an environment with a copy of it."""
    screen: Screen
    max_turns: int

    @classmethod
    def open(
        cls,
        events: ConversationEvents,
        approver: Approver,
        screen: Screen,
        *,
        max_turns: int,
        codebase: Codebase | None = None,
    ) -> "AgentSession":
        """Open a conversation that works in the folder itself.

        Args:
            events: about it, with its policy and its folder.
            approver: asks the user.
            screen: shows what happens.
            max_turns: of the policy, for one instruction.
            codebase: searches the folder; None: with vectors that need no model.
        """
        workspace = open_user_workspace(events.folder, approver, events, codebase=codebase)
        environment = LocalEnvironment(events.policy.tools, workspace)
        return cls(events.policy, events, environment, screen, max_turns)

    async def work(self, instruction: str) -> RolloutEnding:
        """Work on one instruction until the policy ends, or a limit.

        Raises:
            EtudeError: the gateway does not answer or refuses, or the folder is gone.
            CancelledError: the user stopped it.
        """
        self.events.note_instruction(instruction)
        self.policy.add_instruction(instruction)
        costs = RolloutCosts()
        policy = _ObservedPolicy(self.policy, self.events, self.screen, costs)
        environment = _ObservedEnvironment(self.environment, policy, self.screen)
        loop = TurnLoop(policy, environment, self.policy.tools, self.max_turns, costs)
        try:
            ending = await loop.run()
        except asyncio.CancelledError:
            policy.end_turn(is_cancelled=True)
            raise
        except EtudeError:
            policy.drop_turn()
            raise
        finally:
            policy.end_turn()
            self.events.note_end()
        if ending is RolloutEnding.STOPPED and loop.final_message != self.policy.last_text:
            self.screen.show_message(loop.final_message)
        return ending
