"""Decisions about releases: actions, their results, and the rules of the moment."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pydantic import JsonValue

from etude.common.release.channels import MAX_SENTENCE, ServedVersion
from etude.feedback.release.rules import ReleasePolicy, ReleaseRules
from etude.feedback.release.state import CanaryState, ReleaseState


class ReleaseAction(StrEnum):
    """Consequence of a decision."""

    START = "StartCanary"
    GROW = "GrowCanary"
    CONTINUE = "Continue"
    ASK = "Ask"
    """A person has to promote the candidate or roll it back."""
    PROMOTE = "Promote"
    ROLL_BACK = "Rollback"
    ADOPT = "Adopt"
    """A version was made the stable one by hand."""
    FREEZE = "Freeze"
    UNFREEZE = "Unfreeze"
    REFUSE = "Refuse"
    """Nothing changes: the gate, or the state, does not allow what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseDecision:
    """An action, the sentence that says why, the figures behind it, and the state after it."""

    action: ReleaseAction
    sentence: str
    state: ReleaseState
    evidence: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionCase:
    """State and rules at a decision, and the ways in which it can end."""

    state: ReleaseState
    rules: ReleaseRules
    now_ms: int
    evidence: Mapping[str, JsonValue]

    @property
    def freeze(self) -> str:
        """Reason for which only roll-backs are made; empty if there is none."""
        if self.rules.policy is ReleasePolicy.FROZEN:
            return "the policy of the route is Frozen"
        return self.state.freeze

    def change(self, action: ReleaseAction, sentence: str, **fields: object) -> ReleaseDecision:
        state = self.state.model_copy(update=fields)
        return ReleaseDecision(
            action=action,
            sentence=cut_sentence(sentence),
            state=state,
            evidence=self.evidence,
        )

    def refuse(self, why: str) -> ReleaseDecision:
        return self.change(ReleaseAction.REFUSE, f"refused: {why}")

    def promote(self, version: ServedVersion, sentence: str) -> ReleaseDecision:
        return self.change(
            ReleaseAction.PROMOTE,
            sentence,
            stable=version,
            previous=self.state.stable,
            canary=None,
        )

    def keep(self, canary: CanaryState, sentence: str) -> ReleaseDecision:
        return self.change(ReleaseAction.CONTINUE, sentence, canary=canary)

    def end_canary(self, sentence: str) -> ReleaseDecision:
        return self.change(ReleaseAction.ROLL_BACK, sentence, canary=None)


def cut_sentence(text: str) -> str:
    """A sentence as long as a record takes."""
    return text if len(text) <= MAX_SENTENCE else f"{text[: MAX_SENTENCE - 1]}…"
