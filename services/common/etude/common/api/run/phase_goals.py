"""Success policy of a phase, the evaluation gate after it, and its rules about monitors."""

from decimal import Decimal
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common.api.meta import Fraction, Model, Name, Rule

Signed = Annotated[
    str,
    Field(min_length=1, max_length=32, pattern=r"^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?$"),
]
"""A decimal as text; may be negative."""

Comparison = Literal["AtLeast", "AtMost"]


class SuccessPolicy(Model):
    """Ends a phase before its maxSteps."""

    metric: Literal["Reward", "Success", "Loss"]
    """Figure of each step: mean reward or share of successes of its rollouts (reinforcement
    learning), or loss (supervised phases)."""
    op: Comparison
    """Whether the figure must be as large or as small."""
    value: Signed
    """What it is compared with."""
    window_steps: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Steps of the phase whose mean is compared; so many are done in any case."""

    def holds(self, figure: float) -> bool:
        return meets_threshold(figure, self.op, self.value)


class Gate(Model):
    """Condition at the end of a phase for the run to go on."""

    evaluation: Name
    """Entry of evaluation that measures it, at the end of this phase."""
    metric: Literal["Success", "GreedySuccess"] = "Success"
    """Share of tasks that were solved by sampling, or greedily."""
    op: Comparison = "AtLeast"
    """Whether the figure must be as large or as small."""
    value: Signed
    """What it is compared with."""
    on_fail: Literal["Stop", "Suspend", "Continue"] = "Stop"
    """Stop fails the run and Suspend suspends it, both after a checkpoint; Continue only says
    so."""

    def holds(self, figure: float) -> bool:
        return meets_threshold(figure, self.op, self.value)


class MonitorRule(Model):
    """Consequence of a monitor that raises windows of a phase's rollouts."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.action != 'Penalise' || self.name in ['BrokenCalls', 'Deferral', 'JudgeGap']",
            holds=lambda s: (
                s.action != "Penalise" or s.name in {"BrokenCalls", "Deferral", "JudgeGap"}
            ),
            message="action Penalise needs name BrokenCalls, Deferral or JudgeGap: no single"
            " rollout shows what the others look at",
            fix="use action: Freeze, or Report",
            field_path=".action",
        ),
    )

    name: Literal["BrokenCalls", "Deferral", "EditRate", "JudgeGap", "LengthDrift", "MaskedShare"]
    """Monitor, as in "Rewards and monitors"."""
    action: Literal["Report", "Penalise", "Freeze"] = "Report"
    """Report writes an event. Penalise also lowers rewards, from the batch that completes the
    raised window until a window is not raised. Freeze suspends the run after that batch; it goes on
    once afterStep or action is changed."""
    penalty: Fraction = "1"
    """Penalise: subtracted from the reward of each rollout that shows what is raised."""
    after_step: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Steps of the phase up to this one are only reported. With the step of a freeze, which its
    message says, the phase goes on."""


def meets_threshold(figure: float, op: Comparison, value: str) -> bool:
    """True if a figure is as large, or as small, as a value; false for NaN."""
    limit = float(Decimal(value))
    return figure >= limit if op == "AtLeast" else figure <= limit
