"""Signal: tool calls that could not run."""

from etude.common.feedback.payloads import TurnOutcome
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import SignalValue
from etude.feedback.signals.signal import Signal, SignalContext


def count_calls(history: RolloutHistory) -> tuple[int, int]:
    """Count the tool calls of a rollout, and those that could not run.

    The gateway counts what does not parse. Clients count also what names no tool, or has wrong
    arguments; they may send nothing, and cannot make the gateway's figures smaller.
    """
    ends = history.ended_turns()
    told = sum(end.num_tool_calls for end in ends)
    told_broken = sum(
        max(end.num_broken_tool_calls, end.outcome is TurnOutcome.BROKEN_TOOL_CALL) for end in ends
    )
    seen = sum(turn.num_calls for turn in history.main_turns)
    seen_broken = sum(turn.num_broken_calls for turn in history.main_turns)
    broken = max(told_broken, seen_broken)
    return max(told, seen, broken), broken


def measure(history: RolloutHistory, context: SignalContext) -> SignalValue:
    """Number of broken calls, and of calls. Delay: the horizon, for what clients tell late.

    Rollouts that end so are never left out: a policy that breaks its calls where work is hard would
    look better otherwise.
    """
    calls, broken = count_calls(history)
    return SignalValue(broken, calls, context.state(history, delay_s=context.horizon_s))


SIGNAL = Signal("broken_tool_call", version=1, weight=-1.0, measure=measure)
