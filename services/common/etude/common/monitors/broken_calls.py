"""Monitor: a policy ends hard tasks by broken tool calls."""

from etude.common.monitors.share import ShareLimits, check_share
from etude.common.monitors.significance import Ratio
from etude.common.monitors.window import Action, Finding, Monitor, Reference, RolloutFacts, Window

_LIMITS = ShareLimits(name="BrokenCalls", subject="of the tool calls are broken", floor=0.005)


def check(window: Window, reference: Reference) -> Finding | None:
    """Share of calls that are broken, over its median in the reference; and by difficulty."""
    return check_share(_LIMITS, _broken_share, window, reference, action=Action.FREEZE)


def _broken_share(window: Window) -> Ratio:
    return Ratio([r.broken_calls for r in window.rollouts], [r.calls for r in window.rollouts])


def _is_offence(facts: RolloutFacts, reference: Reference) -> bool:
    return facts.broken_calls > 0


MONITOR = Monitor("BrokenCalls", check, _is_offence)
