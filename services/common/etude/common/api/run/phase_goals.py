"""Success policy of a phase, and the evaluation gate after it."""

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field

from etude.common.api.meta import Model, Name

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


def meets_threshold(figure: float, op: Comparison, value: str) -> bool:
    """True if a figure is as large, or as small, as a value; false for NaN."""
    limit = float(Decimal(value))
    return figure >= limit if op == "AtLeast" else figure <= limit
