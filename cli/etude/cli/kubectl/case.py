"""Context of one diagnosis: the observed run, its conditions and the time."""

from dataclasses import dataclass, field
from datetime import datetime

from etude.cli.kubectl.advice import advice
from etude.cli.kubectl.explanation import Explanation, State, in_short
from etude.cli.kubectl.pods import Finding
from etude.cli.kubectl.seen import Seen
from etude.common.api.meta import Condition
from etude.common.api.status import RLRunStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The observed run that each check looks at."""

    seen: Seen
    now: datetime
    status: RLRunStatus = field(init=False)
    conditions: dict[str, Condition] = field(init=False)

    def __post_init__(self) -> None:
        status = self.seen.status
        object.__setattr__(self, "status", status)
        object.__setattr__(self, "conditions", {each.type: each for each in status.conditions})

    def says(self, kind: str, status: str) -> Condition | None:
        """The condition of this type, if it has this status."""
        found = self.conditions.get(kind)
        return found if found is not None and found.status == status else None

    def because(self, state: State, condition: Condition, *more: str) -> Explanation:
        """The diagnosis with a condition as its cause."""
        told = in_short(condition.message)
        known = advice(condition.reason, condition.type)
        finding = Finding(condition.reason, known.means, (told,) if told else (), known.do)
        return self.found(state, finding, *more)

    def found(self, state: State, finding: Finding, *more: str) -> Explanation:
        """The diagnosis with a blocker as its cause."""
        return explanation(self.seen.name, state, finding, *more)


def explanation(run: str, state: State, finding: Finding, *more: str) -> Explanation:
    """The diagnosis of a run with a blocker as its cause."""
    known = advice(finding.reason)
    return Explanation(
        run=run,
        state=state,
        reason=finding.reason,
        cause=finding.cause,
        evidence=(*finding.evidence, *(line for line in more if line)),
        do=(finding.do or known.do).replace("{run}", run),
        runbook=known.runbook,
    )
