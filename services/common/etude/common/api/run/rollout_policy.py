"""Limits of rollouts, and of their contexts."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common import extensions
from etude.common.api.meta import Model, Rule
from etude.common.api.run.async_limits import Concurrency

RESERVE_TOKENS = 1_024
"""Room for the system prompt of a small toolset and for the request of a summary."""


class SummaryPolicy(Model):
    """A full context is summed up by the policy, which goes on from its summary in a new one.

    The new context has the system prompt, the requests of the user, and the summary. The reward of
    the rollout trains the tokens of all its contexts, those of summaries too.
    """

    context_tokens: Annotated[int, Field(ge=2_048, le=1_048_576)]
    """Tokens of one context, its prompt, tool output and summary included."""
    max_tokens: Annotated[int, Field(ge=64, le=65_536)] = 2_048
    """Tokens of one summary, its thinking included; a longer one is cut."""


TOOLSET = rf"^(Standard|Compact|{extensions.NAME})$"


class RolloutPolicy(Model):
    """Limits of one rollout, and what happens to failed ones."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.summaries) || self.summaries.contextTokens < self.maxTokens",
            holds=lambda s: s.summaries is None or s.summaries.context_tokens < s.max_tokens,
            message="summaries.contextTokens must be below maxTokens, which counts all contexts",
            fix="raise maxTokens, or remove summaries",
            field_path=".summaries",
        ),
        Rule(
            cel="!has(self.summaries) || self.maxTurnTokens + 2 * self.summaries.maxTokens"
            f" + {RESERVE_TOKENS} <= self.summaries.contextTokens",
            holds=lambda s: (
                s.summaries is None
                or s.max_turn_tokens + 2 * s.summaries.max_tokens + RESERVE_TOKENS
                <= s.summaries.context_tokens
            ),
            message="summaries.contextTokens must have room for a turn (maxTurnTokens), for the"
            " summaries with which it opens and ends (summaries.maxTokens each), and for"
            f" {RESERVE_TOKENS} tokens of prompts",
            fix="raise summaries.contextTokens, or lower maxTurnTokens or summaries.maxTokens",
            field_path=".summaries",
        ),
    )

    toolset: Annotated[str, Field(max_length=128, pattern=TOOLSET)] = "Standard"
    """System prompt, tools and how their results read; Compact suits very small policies, and
    acme.Deploy is what an installed package registers so."""
    tool_format: Literal["Xml", "Native"] = "Xml"
    """Form of tools and calls: Xml is described in the system prompt and works for any model;
    Native is the model's own, from its chat template, which must show tools."""
    max_concurrent: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Rollouts in flight, each with an environment."""
    max_turns: Annotated[int, Field(ge=1, le=1_024)] = 64
    """Turns of one rollout."""
    max_turn_tokens: Annotated[int, Field(ge=1, le=131_072)] = 4_096
    """Tokens sampled in one turn."""
    max_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 32_768
    """Tokens of a whole transcript, tool output included. With summaries, over all contexts,
    without what a context repeats."""
    summaries: SummaryPolicy | None = None
    """Unless set, a transcript is one context."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 1_800
    """Wall time of one rollout."""
    retries: Annotated[int, Field(ge=0, le=3)] = 1
    """Repeats after a platform fault, before the rollout is masked."""
    max_infra_failure_percent: Annotated[int, Field(ge=0, le=100)] = 30
    """Share of masked rollouts in a step above which the run stops."""

    @property
    def context_tokens(self) -> int:
        """Most tokens of one context."""
        return self.max_tokens if self.summaries is None else self.summaries.context_tokens

    @property
    def max_trained_tokens(self) -> int:
        """Most tokens that a rollout can sample, and thus train; a turn has one summary at most."""
        summary = 0 if self.summaries is None else self.summaries.max_tokens
        return min(self.max_tokens, self.max_turns * (self.max_turn_tokens + summary))


class TrainingRolloutPolicy(RolloutPolicy):
    """Limits of one rollout of a phase, and of all of them together."""

    concurrency: Concurrency | None = None
    """Rollouts that sample at once: fewer while engines queue, are full or preempt, more while they
    have room. One whose tools run does not count. Unset: no limit but maxConcurrent."""
