"""Monitor: a policy asks on clear tasks instead of working."""

import itertools
import math
import statistics
from collections.abc import Iterable

from etude.common.monitors.share import WINDOWS
from etude.common.monitors.window import (
    FEWEST_ROLLOUTS,
    FEWEST_WINDOWS,
    Action,
    Finding,
    Monitor,
    Reference,
    RolloutFacts,
    Window,
)

CLEAR = 0.5
"""Tasks with less ambiguity are clear; unknown ambiguity is none."""
LIMIT = math.log(100_000)
"""Of the sum: a policy that does not change reaches it once in 100,000 rollouts or later."""
_FLOOR = 0.01


def check(window: Window, reference: Reference) -> Finding | None:
    """CUSUM of questions on clear tasks, against a share that is doubled.

    S = max(0, S + log likelihood ratio) over the rollouts of the reference, the windows since then
    and this one, in order: slow growth adds up over windows. S restarts at 0 after a window that
    raised it. A rollout is a question with the median share p of the
    reference, or with 2p + 0.02 (Page 1954; the mean time to a false alarm is at least e^limit).
    """
    answers = _questions(window)
    if len(answers) < FEWEST_ROLLOUTS or len(reference) < FEWEST_WINDOWS:
        return None
    earlier = [_questions(each) for each in reference[-WINDOWS:]]
    shares = [statistics.fmean(each) for each in earlier if each]
    usual = min(0.4, max(_FLOOR, statistics.median(shares) if shares else 0.0))
    before = _cusum(itertools.chain.from_iterable(earlier), usual, start=0.0)[-1]
    for each in window.previous:
        sums = _cusum(_questions(each), usual, start=before)
        before = 0.0 if max(sums) > LIMIT else sums[-1]
    sums = _cusum(answers, usual, start=before)
    share = statistics.fmean(answers)
    return Finding(
        monitor="Deferral",
        figure=max(sums),
        limit=LIMIT,
        is_raised=max(sums) > LIMIT,
        action=Action.FREEZE,
        sentence=f"{share:.1%} of the rollouts on clear tasks end with a question and change"
        f" nothing, against {usual:.1%} before",
    )


def _cusum(answers: Iterable[bool], usual: float, *, start: float) -> list[float]:
    """The sum at the start and after each rollout."""
    gained = 2 * usual + 0.02
    asked, worked = math.log(gained / usual), math.log((1 - gained) / (1 - usual))
    steps = (asked if is_question else worked for is_question in answers)
    return list(itertools.accumulate(steps, lambda total, x: max(0.0, total + x), initial=start))


def _questions(window: Window) -> list[bool]:
    return [
        facts.is_question for facts in window.rollouts if not facts.is_masked and _is_clear(facts)
    ]


def _is_clear(facts: RolloutFacts) -> bool:
    return (facts.ambiguity or 0.0) < CLEAR


def _is_offence(facts: RolloutFacts, reference: Reference) -> bool:
    return facts.is_question and _is_clear(facts)


MONITOR = Monitor("Deferral", check, _is_offence)
