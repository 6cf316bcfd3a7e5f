"""Users of a route: real conversations through its gateway, and what they say about the work.

Conversations, edits, broken calls and times are real. What users keep and say is played: a version
decides it, so that some tens of users are enough to tell two versions apart.
"""

import asyncio
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx2
import openai

from etude.demo.realtime.serving import TENANT, TERMS
from etude.feedback.simulate.conversations import Conversation, ConversationEnd, UserDesk
from etude.feedback.simulate.event_sender import EventSender
from etude.feedback.simulate.reactions import hash_line
from etude.feedback.simulate.user_tasks import UserTask
from etude.feedback.simulate.users import SimulatedUser

CHANCE = 0.1
"""Share of users who do the opposite of the others, and of those who complain."""
HORIZON_S = 3
"""Age at which the persistence of an edit counts, in the route's spec."""
BUSY = 12
"""Conversations at the same time."""
PATIENCE_S = 600.0
"""Of one request; two cores are shared by everything here."""

Event = tuple[str, Mapping[str, object]]


@dataclass(slots=True)
class _Work:
    """Clients of one round."""

    client: openai.AsyncOpenAI
    sender: EventSender
    semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(BUSY))


@dataclass(slots=True, kw_only=True)
class Users:
    """Users with keys, who come in rounds."""

    users: Sequence[SimulatedUser]
    keys: Mapping[str, str]
    """API key of each."""
    tasks: Sequence[UserTask]
    gateway: str
    feedback: str
    """Addresses, by which the certificate does not name them."""
    authority: Path
    """Certificate of the CA that signed what both show."""
    model: str
    num_rounds: int = 0
    num_requests: int = 0
    num_failed: int = 0

    def visit(self, liked: str) -> list[Conversation]:
        """Let every user work on one task; most keep the edits of one version alone.

        Args:
            liked: that version.
        """
        self.num_rounds += 1
        return asyncio.run(self._visit(liked))

    async def _visit(self, liked: str) -> list[Conversation]:
        trust = ssl.create_default_context(cafile=str(self.authority))
        trust.check_hostname = False
        async with (
            httpx2.AsyncClient(verify=trust, timeout=PATIENCE_S) as http,
            openai.AsyncOpenAI(
                base_url=f"{self.gateway}/v1", api_key="-", max_retries=0, http_client=http
            ) as client,
        ):
            work = _Work(client, EventSender(http, self.feedback, TENANT, TERMS))
            async with asyncio.TaskGroup() as group:
                visits = [
                    group.create_task(self._work(work, number, liked))
                    for number in range(len(self.users))
                ]
        assert not work.sender.answers.keys() - {"Stored", "Duplicate"}, work.sender.answers
        return [each.result() for each in visits]

    async def _work(self, work: _Work, number: int, liked: str) -> Conversation:
        user, place = self.users[number], self.num_rounds * len(self.users) + number
        random = user.random(f"round-{self.num_rounds}")
        desk = UserDesk(
            client=work.client.with_options(api_key=self.keys[user.name]),
            model=self.model,
            task=self.tasks[place % len(self.tasks)],
            taste=user.taste,
            random=random,
        )
        async with work.semaphore:
            seen = await desk.converse()
        self.num_requests += len(seen.turns)
        if seen.ending is ConversationEnd.FAILED:
            self.num_requests += 1
            self.num_failed += 1
        if seen.rollout:
            events = [
                work.sender.make_event(user.name, seen.rollout, count, kind, payload)
                for count, (kind, payload) in enumerate(_reactions(seen, liked, random))
            ]
            await work.sender.send(self.keys[user.name], events)
        return seen


def _reactions(seen: Conversation, liked: str, random: Random) -> Iterator[Event]:
    """The events about one conversation: its turns and edits, and the user's opinion."""
    keeps = (seen.version == liked) != (random.random() < CHANCE)
    complains = random.random() < CHANCE
    for number, turn in enumerate(seen.turns):
        yield (
            "turn_ended",
            {
                "turn": number,
                "outcome": "BrokenToolCall" if turn.num_broken_calls else "Completed",
                "wallS": turn.wall_s,
                "numToolCalls": turn.num_calls + turn.num_broken_calls,
                "numBrokenToolCalls": turn.num_broken_calls,
            },
        )
    for number, edit in enumerate(seen.edits):
        name = f"edit-{number}"
        hashes = sorted(hash_line(line, seen.rollout) for line in edit.lines)
        applied = {"turn": edit.turn, "edit": name, "language": "python", "numLines": len(hashes)}
        yield "edit_applied", applied | {"lineHashes": hashes}
        alive = len(hashes) if keeps else 0
        observed = {"edit": name, "ageS": float(HORIZON_S), "isFileSeen": True}
        yield "edit_observed", observed | {"numAliveLines": alive}
    text = "No, that is wrong. Undo it." if complains else "Good. Now the next one."
    yield "followup", {"turn": max(0, len(seen.turns) - 1), "text": text, "afterS": 1.0}
