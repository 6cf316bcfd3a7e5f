"""Replay of a recorded conversation: its calls run again, and their results are compared."""

import difflib
import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from typing_extensions import override

from etude.agent.chat import ChatFormat, Conversation
from etude.agent.chat.template import TemplateError
from etude.agent.chat.traits import make_message
from etude.agent.token_policy import SampledText
from etude.agent.tool_calls import ParsedCall, ToolCall
from etude.agent.tool_messages import RenderedMessage, make_result_messages
from etude.agent.tools.base import ErrorKind, ToolOutcome
from etude.agent.toolsets import Toolset
from etude.agent.trajectory import RolloutCosts, RolloutEnding
from etude.agent.turns import PolicyConversation, PolicyTurn, RolloutEnvironment, TurnLoop, to_json
from etude.common.errors import Problem, UserError


class RecordedTurn(NamedTuple):
    """One turn of a branch, as a record of the gateway has it."""

    num_prefix_tokens: int
    """Tokens of the branch before those read."""
    prompt_ids: Sequence[int]
    """Tokens read since then."""
    token_ids: Sequence[int]
    """Tokens sampled."""


class CallDifference(NamedTuple):
    """A call whose result is not the recorded one."""

    turn: int
    """From 0."""
    call: int
    """Place in the turn, from 0; -1 where the difference is the turn's as a whole."""
    tool: str
    arguments_json: str
    recorded: str
    replayed: str

    def format_diff(self) -> list[str]:
        """Lines of the unified diff from the recorded to the replayed result."""
        texts = (self.recorded.splitlines(), self.replayed.splitlines())
        return [*difflib.unified_diff(*texts, "recorded", "replayed", lineterm="")]


@dataclass(slots=True)
class ReplayReport:
    """Outcome of a replay."""

    num_turns: int = 0
    num_calls: int = 0
    """Calls that were run and compared."""
    num_left_out: int = 0
    """Calls that the user rejected or stopped: they were not run."""
    num_unanswered: int = 0
    """Calls of the last turn: nothing recorded follows them."""
    differences: list[CallDifference] = field(default_factory=list)


async def replay_conversation(
    chat: ChatFormat,
    tools: Toolset,
    environment: RolloutEnvironment,
    turns: Sequence[RecordedTurn],
    *,
    is_left_out: Callable[[str], bool] = lambda _: False,
) -> ReplayReport:
    """Replay a conversation in an environment that has the files it began with.

    Each turn reads the recorded results, whatever its calls return here: one difference makes no
    others but by the files.

    Args:
        chat: of the model that was recorded.
        tools: of the agent, in the form that the policy was trained with.
        environment: runs the calls.
        turns: of the conversation, in their order.
        is_left_out: true for the recorded result of a call that did not run.

    Raises:
        UserError: the turns are no single conversation of the agent with these tools.
        PlatformFaultError: the environment failed.
    """
    policy = _RecordedPolicy.open(chat, tools, turns)
    report = policy.report
    while policy.place < len(policy.turns):
        # Calls of a later instruction have ids of their own: an environment remembers results.
        given = _RecordedEnvironment(environment, policy, f"{policy.place}:", is_left_out)
        await TurnLoop(policy, given, tools, len(turns) + 1, RolloutCosts()).run()
    return report


@dataclass(slots=True)
class _RecordedPolicy(PolicyConversation):
    """Says what was recorded, and compares what the harness says with what follows it there."""

    turns: Sequence[RecordedTurn]
    conversation: Conversation
    tools: Toolset
    report: ReplayReport = field(default_factory=ReplayReport)
    place: int = 0
    """Number of the next turn."""
    results: Sequence[str] | None = None
    """Recorded results of the last turn's calls; None where they cannot be told apart."""
    _instruction: str | None = None
    """What the user says after the last turn, if anything."""
    _last: SampledText = field(default_factory=lambda: SampledText("", (), "", 0))
    _given: Sequence[str] = ()
    """Results that the harness gave to the last turn's calls."""

    @classmethod
    def open(
        cls, chat: ChatFormat, tools: Toolset, turns: Sequence[RecordedTurn]
    ) -> "_RecordedPolicy":
        """Open the conversation with its recorded instruction.

        Raises:
            UserError: it is none of the agent's with these tools.
        """
        joined = join_turns(turns)
        mark = _make_mark()
        opening = chat.open(tools.system_prompt, mark, tools.shown).prompt
        found = split_texts(chat, opening, [mark], joined[0].prompt_ids)
        if found is None:
            fix = "give --toolset and --tool-format as the agent had them, and the model's folder"
            what = "does not begin with the agent's prompt for these tools"
            _refuse(what, fix)
        conversation = chat.open(tools.system_prompt, found[0], tools.shown)
        policy = cls(joined, conversation, tools)
        policy._compare_tokens(joined[0].prompt_ids, conversation.prompt)
        return policy

    @override
    async def sample(self, turn: int) -> PolicyTurn:
        if self.place:
            self._advance()
        ids = self.turns[self.place].token_ids
        self.place += 1
        self.report.num_turns += 1
        chat = self.conversation.chat
        if ids[-1] not in chat.end_ids:
            text = chat.decode(ids)
            self._last = SampledText(text, (), text, 0)
            self.conversation.add_completion(text)
        else:
            self._last = SampledText.read(self.conversation, self.tools, ids)
            self._last.add_to(self.conversation)
        self._given = ()
        self._read_following()
        return PolicyTurn(self._last.calls, self._last.message, is_cut=not self._last.end)

    @override
    def append_results(self, outcomes: Sequence[ToolOutcome]) -> RolloutEnding | None:
        self._given = [outcome.content for outcome in outcomes]
        if self.place == len(self.turns):
            self.report.num_unanswered += len(outcomes)
            return RolloutEnding.STOPPED
        rendered = self._render(self.conversation.copy(), self._given)
        recorded = self.turns[self.place].prompt_ids
        if list(rendered) != list(recorded):
            self._compare_results(rendered, recorded)
        return None if self._instruction is None else RolloutEnding.STOPPED

    def _advance(self) -> None:
        """Let the conversation go on with what was recorded."""
        texts = self._given if self.results is None else self.results
        if len(texts) != len(self._last.calls):
            _refuse(f"tells no results of turn {self.place - 1}", "choose another conversation")
        rendered = self._render(self.conversation, texts)
        if self.results is not None:
            self._compare_tokens(self.turns[self.place].prompt_ids, rendered)

    def _read_following(self) -> None:
        """Read the recorded results of the last turn's calls, and what the user says then."""
        self.results, self._instruction = None, None
        if self.place == len(self.turns):
            return
        num_calls = len(self._last.calls)
        ids = self.turns[self.place].prompt_ids
        for has_instruction in (False, True) if num_calls else (True,):
            marks = [_make_mark() for _ in range(num_calls + has_instruction)]
            self._instruction = marks[-1] if has_instruction else None
            planted = self._render(self.conversation.copy(), marks[:num_calls])
            texts = split_texts(self.conversation.chat, planted, marks, ids)
            if texts is not None:
                self.results = texts[:num_calls]
                self._instruction = texts[-1] if has_instruction else None
                return
        self._instruction = None

    def _render(self, conversation: Conversation, results: Sequence[str]) -> list[int]:
        """Tokens after the last turn, with these results.

        Raises:
            UserError: the chat template does not tell them.
        """
        turn = conversation.last_message
        messages: list[RenderedMessage] = []
        if "tool_calls" in turn:
            messages += make_result_messages(turn, results)
        elif results:
            messages += conversation.chat.make_text_results(results)
        if self._instruction is not None:
            messages.append(make_message("user", self._instruction))
        try:
            return conversation.append_messages(messages)
        except TemplateError as error:
            _refuse(f"cannot be continued after turn {self.place - 1}: {error}", "replay another")

    def _compare_results(self, rendered: Sequence[int], recorded: Sequence[int]) -> None:
        """Compare the results of the last turn's calls, one by one where that is possible."""
        chat, turn = self.conversation.chat, self.place - 1
        marks = [_make_mark() for _ in self._given]
        planted = self._render(self.conversation.copy(), marks)
        # As the template writes them: it may cut blanks at their ends.
        texts = split_texts(chat, planted, marks, rendered)
        if self.results is None or texts is None:
            both = (chat.decode(recorded), chat.decode(rendered))
            self.report.differences.append(CallDifference(turn, -1, "", "", *both))
            return
        for place, (call, before, now) in enumerate(
            zip(self._last.calls, self.results, texts, strict=True)
        ):
            if before != now:
                name = call.name if isinstance(call, ParsedCall) else ""
                arguments = to_json(call.arguments) if isinstance(call, ParsedCall) else call.raw
                found = CallDifference(turn, place, name, arguments, before, now)
                self.report.differences.append(found)

    def _compare_tokens(self, recorded: Sequence[int], rendered: Sequence[int]) -> None:
        """Compare tokens whose texts are the same."""
        if list(recorded) != list(rendered):
            both = (" ".join(map(str, recorded)), " ".join(map(str, rendered)))
            turn = self.place - 1
            self.report.differences.append(CallDifference(turn, -1, "tokens", "", *both))


@dataclass(slots=True)
class _RecordedEnvironment(RolloutEnvironment):
    """Runs the calls, but those that did not run when they were recorded."""

    inner: RolloutEnvironment
    policy: _RecordedPolicy
    prefix: str
    """Of the ids of the calls."""
    is_left_out: Callable[[str], bool]

    @override
    async def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolOutcome]:
        left_out = {} if _has_end(calls) else self._find_left_out(calls)
        sent = [
            call._replace(call_id=self.prefix + call.call_id)
            for call in calls
            if call.call_id not in left_out
        ]
        answers = iter(await self.inner.run(sent) if sent else ())
        self.policy.report.num_calls += len(sent)
        self.policy.report.num_left_out += len(left_out)
        return [left_out.get(call.call_id) or next(answers) for call in calls]

    def _find_left_out(self, calls: Sequence[ToolCall]) -> dict[str, ToolOutcome]:
        """Recorded results of the calls that did not run, by id."""
        results = self.policy.results
        if results is None:
            return {}
        told = {call.call_id: results[int(call.call_id.rpartition(".")[2])] for call in calls}
        return {
            call_id: ToolOutcome(content=text, kind=ErrorKind.TOOL)
            for call_id, text in told.items()
            if self.is_left_out(text)
        }


def _has_end(calls: Sequence[ToolCall]) -> bool:
    """True for the last turn of some work: all its calls ran, and the agent tells no results."""
    return any(call.name == "finish" for call in calls)


def join_turns(turns: Sequence[RecordedTurn]) -> list[RecordedTurn]:
    """Turns of which each goes on where the one before it ended.

    A gateway that was restarted repeats the conversation so far, as a branch of its own.

    Raises:
        UserError: a turn continues another conversation.
    """
    joined: list[RecordedTurn] = []
    known: list[int] = []
    """Tokens so far."""
    for place, turn in enumerate(turns):
        whole = [*known[: turn.num_prefix_tokens], *turn.prompt_ids]
        if whole[: len(known)] != known or len(whole) == len(known) or not turn.token_ids:
            fix = "choose a conversation without sub-agents, summaries and lost records"
            _refuse(f"does not go on from turn to turn: turn {place} continues another text", fix)
        joined.append(RecordedTurn(len(known), whole[len(known) :], turn.token_ids))
        known = [*whole, *turn.token_ids]
    if not joined:
        _refuse("has no turn", "choose another conversation")
    return joined


def split_texts(
    chat: ChatFormat, planted: Sequence[int], marks: Sequence[str], ids: Sequence[int]
) -> list[str] | None:
    """Texts that stand in tokens where marks stand in others; None if their frames differ.

    Args:
        chat: of the model.
        planted: tokens with marks in place of the texts.
        marks: in their order.
        ids: tokens with the texts.
    """
    frames: list[str] = []
    rest = _write_tags(chat, planted)
    for mark in marks:
        frame, found, rest = rest.partition(mark)
        if not found:
            return None
        frames.append(frame)
    text = _write_tags(chat, ids)
    if not text.startswith(frames[0]) or not text.endswith(rest):
        return None
    left = text[len(frames[0]) : len(text) - len(rest)]
    texts: list[str] = []
    for frame in frames[1:]:
        first, found, left = left.partition(frame)
        if not found:
            return None
        texts.append(first)
    texts.append(left)
    # Tags are tokens of the template's: a text that holds one is two texts.
    return None if any(_TAG in each for each in texts) else texts


_TAG = "\ue000"


def _write_tags(chat: ChatFormat, ids: Sequence[int]) -> str:
    """Text of tokens, with each tag written so that a text that spells it is another."""
    tags = set(chat.vocabulary.tags.values())
    groups = itertools.groupby(ids, key=lambda token: token if token in tags else -1)
    return "".join(
        f"{_TAG}{tag}{_TAG}" * len(group) if tag >= 0 else chat.decode(group)
        for tag, group in ((tag, [*group]) for tag, group in groups)
    )


def _make_mark() -> str:
    return uuid.uuid4().hex


def _refuse(what: str, fix: str) -> NoReturn:
    """Refuse a conversation.

    Raises:
        UserError: always.
    """
    raise UserError(Problem("InvalidArgument", what, "recorded conversation", fix))
