"""Signal: turns after which the user's next message complains, corrects or undoes."""

import re

from etude.common.feedback.payloads import FollowupPayload
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import SignalValue
from etude.feedback.signals.signal import FOLLOWUP_S, Signal, SignalContext

_DISSATISFIED = re.compile(
    # a refusal at the start of the message
    r"\A\W{0,3}(?:no|nope|wrong|stop|ugh|wtf|undo|revert)\b"
    r"(?!,? (?:problem|worries|rush|need|thanks|thank you|(?:that|it|this)(?:'s| is) "
    r"(?:fine|ok|okay|good|great|perfect|all|right)))|"
    # the work does not do what it should
    r"\b(?:(?:this|that|it|the \w+)(?:'s| is| was)? (?:still |also |now |just )?"
    r"(?:wrong|incorrect|broken|useless|nonsense|not what i|doesn'?t|does not|didn'?t|did not|"
    r"isn'?t|is not|won'?t|fails?|failed|crash(?:es|ed)?|breaks?|broke)\b)|"
    r"\bstill (?:not|fails?|failing|broken|doesn'?t|isn'?t|the same|wrong|get(?:ting)?)\b|"
    r"\b(?:doesn'?t|does not|didn'?t|did not) (?:work|compile|run|build|help|fix|pass)\b|"
    # a correction of what was understood
    r"\bi (?:did not|didn'?t|never) (?:ask|want|say|mean|tell)\b|"
    r"\bi (?:said|meant|asked for|told you|already (?:said|told|asked))\b|"
    r"\bnot what i\b|\bwhy (?:did|do|are|would) you\b|\byou (?:forgot|missed|broke|deleted|removed|"
    r"ignored|misunderstood|should(?:n'?t| not) have|were supposed)\b|"
    r"\b(?:please )?(?:don'?t|do not|stop) (?:do|change|touch|delete|remove|add|ask)|"
    # an undo
    r"\b(?:undo|revert|roll(?:ing)? ?back|restore) (?:it|that|this|those|these|everything|all of|"
    r"your|my|what you|the (?:last|change|edit|previous|old|original))|"
    r"\b(?:take|put|change|bring) (?:it|that|this|those|these|everything) back\b",
    re.IGNORECASE,
)


def measure(history: RolloutHistory, context: SignalContext) -> SignalValue:
    """Number of such turns, and of the turns that users could judge. Delay: half an hour, or less.

    Users judge a turn that ends with words, and the newest one; after any other one a tool's result
    follows. Over all turns, a complaint would weigh less the longer the work took, and the policy
    that never ends would please most. The answer to a question is no verdict, unless it complains:
    else a policy would thin its complaints out by asking. The first message after each turn counts,
    if it comes within that time.
    """
    within_s = min(FOLLOWUP_S, context.horizon_s)
    first: dict[int, FollowupPayload] = {}
    for message in history.payloads("followup"):
        first.setdefault(message.turn, message)
    found = sum(
        message.after_s <= within_s and is_dissatisfied(message.text) for message in first.values()
    )
    turns = history.main_turns
    judged = sum(not (turn.num_calls or turn.asks_question) for turn in turns[:-1])
    found = min(found, len(turns))
    state = context.state(history, delay_s=within_s)
    return SignalValue(found, max(found, judged + len(turns[-1:])), state)


def is_dissatisfied(text: str) -> bool:
    """True if a message complains about the turn before it, corrects it, or wants it undone.

    For English. A message that asks for something new is none, and neither is a question.
    """
    return _DISSATISFIED.search(text) is not None


SIGNAL = Signal("dissatisfied_followup", version=3, weight=-1.0, measure=measure)
