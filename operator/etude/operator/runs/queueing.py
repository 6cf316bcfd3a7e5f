"""Conditions that the operator writes into a run's Kueue Workload: ready, released, finished.

Source: the contract of Kueue's jobs (pkg/controller/jobframework/reconciler.go).
"""

from collections.abc import Iterator, Mapping

from etude.common.api.kinds import RLRun
from etude.operator.actions import Moment, Tell
from etude.operator.builders import kueue
from etude.operator.builders import run as desired
from etude.operator.clock import rfc3339
from etude.operator.conditions import Fact, no, yes
from etude.operator.manifests import Manifest, condition, is_deleting, is_true
from etude.operator.runs.lifecycle import transitions
from etude.operator.runs.observe import Seen

AT_ONCE = {"Preempted", "NodeFailures"}
"""Evictions after which a run is requeued immediately; after others Kueue says when."""


def told(run: RLRun, seen: Seen, now: Moment, ending: Fact | None) -> Iterator[Tell]:
    """Status writes that the Workload does not show yet.

    Args:
        run: the run.
        seen: its observed state.
        now: both clocks.
        ending: Complete or Failed, once the run is over.
    """
    live = seen.children.get(kueue.ref_of(run))
    if live is None or is_deleting(live) or is_true(live, "Finished"):
        return
    if ending is not None:
        reason = "Succeeded" if ending.type == "Complete" else "Failed"
        yield _told(live, [yes("Finished", reason, ending.message or ending.reason)], now)
    elif is_true(live, "Evicted") and is_true(live, "QuotaReserved") and seen.is_gone:
        yield _told(live, _left(condition(live, "Evicted")), now, without="admission")
    else:
        fact = _readiness(live, are_ready=_are_ready(run, seen))
        if fact is not None:
            yield _told(live, [fact], now)


def _left(evicted: Mapping[str, str]) -> list[Fact]:
    """Conditions that give the quota of an evicted Workload back."""
    why = evicted.get("message") or ""
    reason = evicted.get("reason") or "Evicted"
    return [
        no("QuotaReserved", "Pending", why),
        no("Admitted", "NoReservation", "The workload has no reservation"),
        _not_ready("WaitForStart"),
        Fact("Requeued", reason in AT_ONCE, reason, why),
    ]


def _are_ready(run: RLRun, seen: Seen) -> bool:
    attempts = transitions.attempts_of(run)
    return all(
        seen.ready(role, attempt=attempts.get(role, 0)) >= pods
        for role, pods in desired.roles(run).items()
    )


def _readiness(live: Manifest, *, are_ready: bool) -> Fact | None:
    """The PodsReady condition if it changed; None if it did not.

    Kueue's time-outs depend on the reason, and start again with each admission.
    """
    before = condition(live, "PodsReady")
    was_ready, reason = before.get("status") == "True", before.get("reason")
    if not is_true(live, "Admitted"):
        fact = _not_ready("WaitForStart")
    elif not are_ready:
        lost = was_ready or reason == "WaitForRecovery"
        fact = _not_ready("WaitForRecovery" if lost else "WaitForStart")
    else:
        again = reason in {"WaitForRecovery", "Recovered"}
        fact = yes("PodsReady", "Recovered" if again else "Started", "All pods are ready")
    is_known = (was_ready, reason) == (fact.holds, fact.reason)
    is_first = not before and not is_true(live, "Admitted")
    return None if is_known or is_first else fact


def _not_ready(reason: str) -> Fact:
    return no("PodsReady", reason, "Not all pods are ready")


def _told(live: Manifest, facts: list[Fact], now: Moment, *, without: str = "") -> Tell:
    """The Workload's status with these conditions in addition to those of other writers."""
    status = live.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    for fact in facts:
        before = conditions.get(fact.type, {})
        truth = "True" if fact.holds else "False"
        is_same = before.get("status") == truth
        conditions[fact.type] = {
            "type": fact.type,
            "status": truth,
            "reason": fact.reason,
            "message": fact.message,
            "observedGeneration": live["metadata"].get("generation", 0),
            "lastTransitionTime": before["lastTransitionTime"] if is_same else rfc3339(now.wall_s),
        }
    kept = {name: part for name, part in status.items() if name != without}
    return Tell(seen=live, status={**kept, "conditions": list(conditions.values())})
