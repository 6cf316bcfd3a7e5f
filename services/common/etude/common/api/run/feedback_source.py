"""Windows of production rollouts that a phase of type Feedback trains."""

from typing import Annotated, ClassVar

from pydantic import Field

from etude.common.api.meta import Fraction, Model, Rule, Uri, number

MAX_RELEASE_LAG = 1
"""Trained windows by which the version of a window may be behind the trainer."""


class FeedbackSource(Model):
    """Source of windows, and what one needs to be trained."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="double(self.klBudget) > 0.0",
            holds=lambda s: number(s.kl_budget) > 0,
            message="klBudget must be above 0: with 0 no window is ever trained",
            fix='give nats per token, for example "0.01"',
            field_path=".klBudget",
        ),
    )

    uri: Uri
    """Store of a feedback service, with windows/ and rollouts/; reached as spec.storage says."""
    min_rollouts: Annotated[int, Field(ge=2, le=10_000)] = 64
    """A window with fewer usable rollouts is dropped: its gradient would be noise."""
    max_age_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 86_400
    """A window that was closed longer ago is dropped when its turn comes."""
    kl_budget: Fraction = "0.01"
    """Mean divergence from the version that served the window, in nats per token, from which the
    rest of the window is dropped. It is measured before each step, on rollouts of that step."""
    steps_per_window: Annotated[int, Field(ge=1, le=64)] = 4
    """Optimiser steps into which the rollouts of a window are cut, at random by the phase's
    seed."""
    max_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 32_768
    """Tokens of one context of a rollout; a rollout with a longer one is masked. The denominator of
    algorithms whose lossScale is not set."""
