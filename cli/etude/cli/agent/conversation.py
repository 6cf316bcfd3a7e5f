"""Conversations of `etude agent`: instructions, stops by Ctrl-C, and the end of the task."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from etude.agent.interactive.consent import AgentState
from etude.agent.interactive.gateway_policy import GatewayPolicy
from etude.agent.interactive.session import AgentSession, ConversationEvents
from etude.agent.search.codebase import Codebase
from etude.agent.search.remote import RemoteCodebase
from etude.agent.search.shared_index import SharedIndex
from etude.agent.trajectory import RolloutEnding
from etude.cli.agent.screen import TerminalInput, TextScreen
from etude.cli.output import say, say_problem
from etude.common.errors import EtudeError, Problem, UserError
from etude.common.feedback.client import EventClient
from etude.common.feedback.http_exchange import check_address
from etude.common.turns.turn_log import identify_rollout

FLUSH_S = 10.0
_LAST_FLUSH_S = 2.0
"""After a signal: what waits is on the disk, and a supervisor kills soon."""
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
ENDS = {
    RolloutEnding.LENGTH_LIMIT: "the turn was cut at its limit of tokens: see --turn-tokens",
    RolloutEnding.TURN_LIMIT: "stopped at the limit of turns: say `go on`, or see --turns",
}
_OUTCOMES = {"/done": "Closed", "/abandon": "Abandoned"}


@dataclass(slots=True)
class WorkEnd:
    """End of the work, by signals too: SIGTERM and a terminal that closes act as Ctrl-C does."""

    open_client: Callable[[], EventClient | None]
    """Client of the events that are sent at the end."""
    ended_by: int = 0
    """Signal that ended the work."""

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Send at the end what waits, however it comes.

        Raises:
            KeyboardInterrupt: by Ctrl-C.
            SystemExit: by another signal.
        """
        before = {number: signal.signal(number, self._end) for number in _END_SIGNALS}
        try:
            yield
        except KeyboardInterrupt:
            if not self.ended_by:
                raise
        finally:
            if client := self.open_client():
                flush_events(client, timeout_s=_LAST_FLUSH_S if self.ended_by else FLUSH_S)
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.ended_by:
            raise SystemExit(128 + self.ended_by)

    def _end(self, number: int, frame: FrameType | None) -> None:
        """End the work as Ctrl-C does.

        Raises:
            KeyboardInterrupt: nothing is at work.
        """
        self.ended_by = number
        stop = signal.getsignal(signal.SIGINT)
        if not callable(stop):  # ignored, as in the background of a shell
            raise KeyboardInterrupt
        stop(signal.SIGINT, frame)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserWork:
    """Work of a user, in a folder or on a copy of it."""

    home: AgentState
    key: str
    """API key, for events too."""
    folder: Path
    """Absolute."""
    make_policy: Callable[[], GatewayPolicy]
    max_turns: int
    """For one instruction."""
    accepts_edits: bool
    """Edits are made, and patches applied, without a question."""

    def open_client(self) -> EventClient | None:
        """Open the client of events; without a decision of the user, say how to consent."""
        if self.home.read_consent() is None:
            say(
                "no feedback is sent; to help the policy learn from you: etude agent consent --help"
            )
        return self.home.open_client(self.key)

    def open_events(self, client: EventClient | None) -> ConversationEvents:
        """Open a conversation's events, and say by which name the gateway records it."""
        policy = self.make_policy()
        stored = self.home.read_consent()
        if client is not None and stored is not None:
            say(f"session {identify_rollout(stored.tenant, stored.user, policy.rollout)}")
        return ConversationEvents(client, self.home, self.folder, policy)


@dataclass(slots=True)
class TerminalConversation:
    """One task of a user."""

    session: AgentSession
    home: AgentState
    terminal: TerminalInput
    # One loop for all instructions: locks of the workspace belong to it.
    _runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    _end: WorkEnd = field(init=False)

    def __post_init__(self) -> None:
        self._end = WorkEnd(self.session.events.open_client)

    def work_once(self, instruction: str) -> None:
        """Work on one instruction.

        Raises:
            KeyboardInterrupt: the user stopped it; the task ends as given up.
            SystemExit: a signal ended it; the task ends as given up, too.
        """
        with self._end.watch(), self._runner:
            try:
                self._work(instruction)
            except KeyboardInterrupt:
                self.session.events.close("Abandoned")
                raise
            self.session.events.close("Closed")

    def converse(self) -> None:
        """Work on each message of the user until the end of input, or Ctrl-C at the prompt.

        Raises:
            SystemExit: a signal ended it; the task is given up if the policy was at work.
        """
        with self._end.watch(), self._runner:
            self.session.events.close(self._converse())

    def _converse(self) -> str:
        """Returns the outcome of the task."""
        with contextlib.suppress(KeyboardInterrupt):
            while line := self.terminal.read_line("> "):
                text = line.strip()
                if text in _OUTCOMES:
                    return _OUTCOMES[text]
                if text:
                    self._try_work(text)
                if self._end.ended_by:
                    return "Abandoned"
        return "Closed"

    def _try_work(self, text: str) -> None:
        """Work on a message; after a stop or an error the conversation goes on."""
        try:
            self._work(text)
        except KeyboardInterrupt:
            if not self._end.ended_by:
                say("stopped; Ctrl-D ends the conversation")
        except EtudeError as error:
            say_problem(error)

    def _work(self, instruction: str) -> None:
        if client := self.session.events.open_client():
            self.home.observe(client)
        ending = self._runner.run(self.session.work(instruction))
        if ending in ENDS:
            say(ENDS[ending])


def converse(work: UserWork, prompt: str, *, accepts_commands: bool, search: str) -> None:
    """Work in the folder: on a prompt, or without one in a conversation.

    Args:
        work: what the user asked for.
        prompt: first and only instruction; empty: they are read from the terminal.
        accepts_commands: commands run without a question.
        search: see `open_codebase`.

    Raises:
        UserError: there is no such search.
    """
    codebase = open_codebase(search)
    terminal = TerminalInput(sys.stdin.fileno())
    ask = terminal.ask if sys.stdin.isatty() else None
    screen = TextScreen(work.accepts_edits, accepts_commands, ask)
    events = work.open_events(work.open_client())
    session = AgentSession.open(events, screen, screen, max_turns=work.max_turns, codebase=codebase)
    conversation = TerminalConversation(session, work.home, terminal)
    if prompt:
        conversation.work_once(prompt)
    else:
        conversation.converse()


def open_codebase(search: str) -> Codebase:
    """Open a search of the user's folder.

    Args:
        search: URL of a code search service, or file of a trained encoder; empty: vectors that need
            no model.

    Raises:
        UserError: the URL cannot be used, or there is no such encoder.
        CorruptError: the file is not an encoder.
    """
    if not search:
        return Codebase()
    if "://" in search:
        return RemoteCodebase(address=check_url(search, "--search"))
    from etude.agent.search.embedders.registry import load_embedder  # noqa: PLC0415 - loads numpy

    path = Path(search)
    embedder = load_embedder(path.name.removesuffix(".npz"), path.parent)
    return Codebase(SharedIndex(embedder=embedder))


def flush_events(client: EventClient, *, timeout_s: float = FLUSH_S) -> bool:
    """Send what waits; false if something waits on."""
    report = client.flush(timeout_s=timeout_s)
    if report.problem:
        what = f"feedback: {report.problem}; {report.waiting_bytes} bytes of events wait"
        say(f"{what}\n  fix: they are sent at the next start, or by etude agent observe")
    for reason, number in client.read_counts().given_up.items():
        say(f"feedback: {number} events were given up ({reason})")
    return not report.problem


def check_url(url: str, option: str) -> str:
    """Check the address of a service that is sent a key, or code.

    Raises:
        UserError: it cannot be used.
    """
    try:
        check_address(url)
    except ValueError as error:
        fix = "such as https://gateway.example.com"
        raise UserError(Problem("InvalidArgument", str(error), option, fix)) from error
    return url.rstrip("/")
