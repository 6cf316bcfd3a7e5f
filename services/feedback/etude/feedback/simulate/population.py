"""A population at work: conversations and reactions of many users, a few at a time."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import openai

from etude.feedback.simulate.conversations import Conversation, ConversationEnd, UserDesk
from etude.feedback.simulate.event_sender import EventSender
from etude.feedback.simulate.reactions import UserReactions, decide_reactions
from etude.feedback.simulate.user_tasks import UserTask
from etude.feedback.simulate.users import SimulatedUser


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One conversation with the truth behind it."""

    user: str
    conversation: Conversation
    reactions: UserReactions | None
    """None: the request failed, and the user leaves without a word."""

    @property
    def latency_s(self) -> float:
        """Mean time that a turn took."""
        turns = self.conversation.turns
        return sum(turn.wall_s for turn in turns) / len(turns) if turns else 0.0


@dataclass(slots=True)
class Population:
    """Users who work with one gateway."""

    users: Sequence[SimulatedUser]
    tasks: Sequence[UserTask]
    """Given out in order; each is used once."""
    keys: Mapping[str, str]
    """API key of each user."""
    client: openai.AsyncOpenAI
    model: str
    sender: EventSender
    horizon_s: float
    """Age of an edit at which its persistence counts; users really wait for it."""
    max_concurrent: int = 48
    """Conversations at the same time."""
    num_requests: int = 0
    num_failed: int = 0
    num_given: int = 0
    """Tasks that were given out."""
    gone: set[str] = field(default_factory=set)
    """Users who never come back."""

    async def visit(self, *, only: frozenset[str] | None = None, num_tasks: int = 1) -> list[Visit]:
        """Let every user who still comes work; returns when all events are stored.

        Args:
            only: users to come; all who are not gone unless given.
            num_tasks: of each user, one after the other; a user who leaves does no more.

        Raises:
            TimeoutError: the feedback service did not take the events of a user.
        """
        busy = asyncio.Semaphore(self.max_concurrent)
        coming = [
            user
            for user in self.users
            if user.name not in self.gone and (only is None or user.name in only)
        ]
        first = self.num_given
        self.num_given += len(coming) * num_tasks
        try:
            async with asyncio.TaskGroup() as group:
                visits = [
                    group.create_task(
                        self._work(user, range(first + index, self.num_given, len(coming)), busy),
                        name=user.name,
                    )
                    for index, user in enumerate(coming)
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [visit for work in visits for visit in work.result()]

    async def _work(
        self, user: SimulatedUser, numbers: Sequence[int], busy: asyncio.Semaphore
    ) -> list[Visit]:
        """Visits of one user, by the numbers of their tasks."""
        visits: list[Visit] = []
        for number in numbers:
            if user.name in self.gone:
                break
            visits.append(await self._visit(user, number, busy))
        return visits

    async def _visit(self, user: SimulatedUser, number: int, busy: asyncio.Semaphore) -> Visit:
        random = user.random(f"visit-{number}")
        desk = UserDesk(
            client=self.client.with_options(api_key=self.keys[user.name]),
            model=self.model,
            task=self.tasks[number % len(self.tasks)],
            taste=user.taste,
            random=random,
        )
        async with busy:
            seen = await desk.converse()
        self.num_requests += len(seen.turns)
        if seen.ending is ConversationEnd.FAILED:
            self.num_requests += 1
            self.num_failed += 1
            return Visit(user=user.name, conversation=seen, reactions=None)
        reactions = decide_reactions(user.taste, seen, random=random, horizon_s=self.horizon_s)
        if reactions.is_displeased and random.random() >= user.taste.returns:
            self.gone.add(user.name)
        await self._send(user, seen.rollout, reactions)
        return Visit(user=user.name, conversation=seen, reactions=reactions)

    async def _send(self, user: SimulatedUser, rollout: str, reactions: UserReactions) -> None:
        """Send the events, each at its time; those of one moment together."""
        events = [
            (reaction.delay_s, self.sender.make_event(user.name, rollout, n, *reaction[1:]))
            for n, reaction in enumerate(reactions.events)
        ]
        started_s = asyncio.get_running_loop().time()
        while events:
            delay_s = events[0][0]
            passed_s = asyncio.get_running_loop().time() - started_s
            await asyncio.sleep(max(0.0, delay_s - passed_s))
            due_s = asyncio.get_running_loop().time() - started_s
            now = [event for at_s, event in events if at_s <= due_s]
            events = events[len(now) :]
            await self.sender.send(self.keys[user.name], now)
