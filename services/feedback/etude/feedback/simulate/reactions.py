"""Reactions of a user to a conversation: a pure function of hidden truth and chance.

A user keeps what is right, and corrects what is wrong once it is noticed; some of both is not seen,
as the user leaves. The service learns of the events alone.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from etude.common.feedback.payloads import ReasonCategory, TaskOutcome, TurnOutcome
from etude.feedback.simulate.conversations import (
    Conversation,
    ConversationEnd,
    SeenEdit,
    count_lines,
)
from etude.feedback.simulate.users import HiddenTaste, LeavingReason

LOOKS = (0.25, 0.5, 1.0)
"""Ages of an edit at which the client looks at its file, in horizons."""
_REJECTS = 0.15
"""A mistake noticed before this part of the horizon is rejected on sight."""
_FOLLOWUP_AT = 0.2
_COMPLAINTS = {
    ConversationEnd.FINISHED: (
        "No, that is wrong. Undo it.",
        "That did not fix it.",
        "It still fails.",
    ),
    ConversationEnd.QUESTION: ("Stop asking and just fix it.", "Why do you ask again?"),
    ConversationEnd.BROKEN_CALL: ("That is broken. Try again.", "It did not work."),
    ConversationEnd.TURN_LIMIT: ("You forgot to finish it.", "It still does not work."),
}
_ESCAPES = frozenset({ConversationEnd.QUESTION, ConversationEnd.BROKEN_CALL})
"""Endings by which a policy avoids work."""
_THANKS = ("Thanks.", "Good. Now the next one.", "Great, that works.")
_REASONS = {
    ConversationEnd.QUESTION: ReasonCategory.SLOW,
    ConversationEnd.BROKEN_CALL: ReasonCategory.INCOMPLETE,
    ConversationEnd.TURN_LIMIT: ReasonCategory.SLOW,
}


class Reaction(NamedTuple):
    """One event to send."""

    delay_s: float
    """After the end of the conversation."""
    kind: str
    payload: Mapping[str, object]
    """In the names of the wire."""


class FileFate(NamedTuple):
    """Times of what happens to the user's files, after the end of the conversation."""

    lost_s: float
    """The user corrects or rewrites them; infinite: never."""
    left_s: float
    """They are not seen any more; infinite: always seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserReactions:
    """Reactions to one conversation, and the truth behind them."""

    events: tuple[Reaction, ...]
    num_lines: int
    """Lines of all edits."""
    num_kept_lines: int
    """Of these, lines alive at the horizon, seen or not."""
    is_displeased: bool
    has_complained: bool


def decide_reactions(
    taste: HiddenTaste, seen: Conversation, *, random: Random, horizon_s: float
) -> UserReactions:
    """Decide what a user does after a conversation.

    Args:
        taste: of the user.
        seen: the conversation; it did not fail.
        random: chance.
        horizon_s: age of an edit at which its persistence counts.
    """
    is_done = seen.task.is_done(seen.files)
    fate = draw_fate(taste, is_done=is_done, random=random, horizon_s=horizon_s)
    is_displeased = _is_displeasing(taste, seen, is_done=is_done, fate=fate, horizon_s=horizon_s)
    has_complained = is_displeased and random.random() < taste.complains
    events = [
        *_report_turns(seen),
        *_report_edits(seen, fate, is_done=is_done, horizon_s=horizon_s),
        *_speak(seen, random, horizon_s, displeased=is_displeased, complains=has_complained),
        *_rate(taste, seen, random, horizon_s, displeased=is_displeased),
        _close(seen, fate, is_done=is_done, horizon_s=horizon_s),
    ]
    counts = [
        count_alive(seen, e, lost_s=fate.lost_s, age_s=horizon_s, is_done=is_done)
        for e in seen.edits
    ]
    return UserReactions(
        events=tuple(sorted(events, key=lambda event: event.delay_s)),
        num_lines=sum(len(edit.lines) for edit in seen.edits),
        num_kept_lines=sum(counts),
        is_displeased=is_displeased,
        has_complained=has_complained,
    )


def draw_fate(taste: HiddenTaste, *, is_done: bool, random: Random, horizon_s: float) -> FileFate:
    """Draw the fate of the user's files."""
    loses = random.random() < (taste.changes_mind if is_done else taste.notices)
    lost_s = random.uniform(0.02, 0.98) * horizon_s
    share = taste.leaves
    if taste.leaving is LeavingReason.BAD_EDIT:
        share *= 0.4 if is_done else 1.6
    leaves = random.random() < share
    left_s = random.random() * horizon_s
    return FileFate(lost_s if loses else math.inf, left_s if leaves else math.inf)


def count_alive(
    seen: Conversation, edit: SeenEdit, *, lost_s: float, age_s: float, is_done: bool
) -> int:
    """Count the lines of an edit that are in its file at an age.

    Once the user corrected a wrong file it is as wanted; one that the user rewrites has lost them.
    """
    lines = Counter(edit.lines)
    if age_s < lost_s:
        data = seen.files.get(edit.path, b"")
    elif is_done:
        return 0
    else:
        data = seen.task.wanted.get(edit.path, seen.task.files.get(edit.path, b""))
    return (lines & count_lines(data)).total()


def hash_line(line: str, key: str) -> str:
    """Hash one line of an edit, as the event client does."""
    return hashlib.blake2b(line.encode(), key=key.encode()[:64], digest_size=8).hexdigest()


def _is_displeasing(
    taste: HiddenTaste, seen: Conversation, *, is_done: bool, fate: FileFate, horizon_s: float
) -> bool:
    if taste.forgives and seen.ending in _ESCAPES:
        return False
    if seen.ending is not ConversationEnd.FINISHED or not seen.edits:
        return True
    if taste.wants_tests and not seen.is_tested:
        return True
    return not is_done and fate.lost_s <= _FOLLOWUP_AT * horizon_s * 2


def _report_turns(seen: Conversation) -> Iterator[Reaction]:
    for number, turn in enumerate(seen.turns):
        outcome = TurnOutcome.COMPLETED
        if turn.num_broken_calls:
            outcome = TurnOutcome.BROKEN_TOOL_CALL
        payload = {
            "turn": number,
            "outcome": outcome,
            "wallS": turn.wall_s,
            "numToolCalls": turn.num_calls + turn.num_broken_calls,
            "numBrokenToolCalls": turn.num_broken_calls,
        }
        yield Reaction(0.0, "turn_ended", payload)


def _report_edits(
    seen: Conversation, fate: FileFate, *, is_done: bool, horizon_s: float
) -> Iterator[Reaction]:
    for number, edit in enumerate(seen.edits):
        name = f"edit-{number}"
        hashes = sorted(hash_line(line, seen.rollout) for line in edit.lines)
        yield Reaction(0.0, "shown", {"turn": edit.turn, "numLines": len(edit.lines)})
        applied = {"language": "python", "numLines": len(hashes), "lineHashes": hashes}
        yield Reaction(0.0, "edit_applied", {"turn": edit.turn, "edit": name, **applied})
        if fate.lost_s <= _REJECTS * horizon_s:
            yield Reaction(fate.lost_s, "rejected", {"turn": edit.turn})
        else:
            yield Reaction(0.05 * horizon_s, "accepted", {"turn": edit.turn})
        for look in LOOKS:
            age_s = look * horizon_s
            if fate.left_s <= age_s:
                blind = {"edit": name, "ageS": age_s, "isFileSeen": False}
                yield Reaction(age_s, "edit_observed", blind)
                break
            alive = count_alive(seen, edit, lost_s=fate.lost_s, age_s=age_s, is_done=is_done)
            observed = {"edit": name, "ageS": age_s, "isFileSeen": True, "numAliveLines": alive}
            yield Reaction(age_s, "edit_observed", observed)


def _speak(
    seen: Conversation, random: Random, horizon_s: float, *, displeased: bool, complains: bool
) -> Iterator[Reaction]:
    """The user's next message; some say nothing."""
    delay_s = random.uniform(0.5, 1.0) * _FOLLOWUP_AT * horizon_s
    thanks = random.random() < 0.5
    if complains:
        text = random.choice(_COMPLAINTS.get(seen.ending, _COMPLAINTS[ConversationEnd.FINISHED]))
    elif thanks and not displeased:
        text = random.choice(_THANKS)
    else:
        return
    payload = {"turn": len(seen.turns) - 1, "text": text, "afterS": delay_s}
    yield Reaction(delay_s, "followup", payload)


def _rate(
    taste: HiddenTaste, seen: Conversation, random: Random, horizon_s: float, *, displeased: bool
) -> Iterator[Reaction]:
    if random.random() >= taste.rates:
        return
    turn = len(seen.turns) - 1
    delay_s = 0.3 * horizon_s
    yield Reaction(delay_s, "thumb", {"turn": turn, "isPositive": not displeased})
    if displeased:
        category = _REASONS.get(seen.ending, ReasonCategory.WRONG)
        yield Reaction(delay_s, "reason", {"turn": turn, "category": category})


def _close(seen: Conversation, fate: FileFate, *, is_done: bool, horizon_s: float) -> Reaction:
    if not seen.edits or fate.left_s <= horizon_s:
        outcome = TaskOutcome.ABANDONED
    elif is_done:
        outcome = TaskOutcome.MERGED
    else:
        outcome = TaskOutcome.REVERTED if fate.lost_s <= horizon_s else TaskOutcome.CLOSED
    return Reaction(horizon_s, "task_closed", {"outcome": outcome})
