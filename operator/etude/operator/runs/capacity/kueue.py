"""Kueue quota of a run: admission by its LocalQueue, priority, and the status of its Workload.

Sources: the contract of Kueue's jobs (pkg/controller/jobframework/reconciler.go), and their
priorities (pkg/util/priority).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.operator.actions import ClockReading, WriteStatus
from etude.operator.builders import jobset, kueue, pod_overrides, run_spec
from etude.operator.builders.kueue import NodeFlavor, QueuePriority
from etude.operator.clock import rfc3339
from etude.operator.conditions import ConditionFact, false_condition, true_condition
from etude.operator.manifests import Manifest, condition, is_deleting, is_true
from etude.operator.reasons import Reason
from etude.operator.runs.lifecycle import transitions
from etude.operator.runs.observe import ObservedRun

REQUEUED_IMMEDIATELY = {"Preempted", "NodeFailures"}
"""Evictions after which a run is requeued immediately; after others Kueue says when."""

QUOTA_RESERVED = "QuotaReserved"


class QuotaState(NamedTuple):
    """Quota state of a run: admitted, waiting, or evicted but still holding pods."""

    is_reserved: bool
    """The queue has admitted the run."""
    reason: Reason
    message: str = ""
    is_evicted: bool = False
    """The run was evicted and still has pods."""
    flavors: Mapping[str, NodeFlavor] = {}
    """Node selector and tolerations of each role."""

    @property
    def allows_pods(self) -> bool:
        """Pods may exist: those of an evicted run until they have saved."""
        return self.is_reserved or self.is_evicted

    @property
    def fact(self) -> ConditionFact:
        """The QuotaReserved condition."""
        return ConditionFact(QUOTA_RESERVED, self.is_reserved, self.reason, self.message)


def quota_state(run: RLRun, observed: ObservedRun) -> QuotaState:
    """The quota state of a run now; a run without a queue needs no quota."""
    match run.spec.scheduling.admission:
        case "None":
            return QuotaState(is_reserved=True, reason=Reason.NOT_NEEDED)
        case "JobSet":
            return _job_set_quota(run, observed.children.get(jobset.job_set_ref(run)))
        case "Workload":
            return _workload_quota(run, observed)


def needs_workload(run: RLRun, observed: ObservedRun, *, is_wanted: bool) -> bool:
    """The run should have a Workload.

    A suspended run gives its quota back when its pods are gone. A finished run keeps its Workload,
    which is Finished and holds no quota.
    """
    is_over = run.status.completion_time is not None
    is_busy = run.status.intent is not None or not observed.has_no_pods
    return is_over or is_busy or (is_wanted and is_queueable(run, observed))


def is_queueable(run: RLRun, observed: ObservedRun) -> bool:
    """The run can be queued: its WorkloadPriorityClass exists."""
    named = run.spec.scheduling.workload_priority_class_name
    by_hand = run.spec.scheduling.admission == "Workload"
    return not by_hand or named is None or named in observed.queue.priorities


def _job_set_quota(run: RLRun, live: Manifest | None) -> QuotaState:
    if live is None or is_deleting(live) or live["spec"].get("suspend", False):
        return _waiting(run)
    return _reserved(run)


def _workload_quota(run: RLRun, observed: ObservedRun) -> QuotaState:
    live = observed.children.get(kueue.workload_ref(run))
    assigned = kueue.assigned_flavors(live) if live is not None else {}
    flavor_names = {name for names in assigned.values() for name in names}
    flavors, clash = _node_flavors(live, assigned, observed)
    if live is None or is_deleting(live):
        state = _waiting(run)
    elif not is_true(live, "Admitted") or is_true(live, "Evicted"):
        state = _waiting(run, live)
    elif flavor_names - observed.queue.flavors.keys():
        missing = ", ".join(sorted(flavor_names - observed.queue.flavors.keys()))
        state = _denied(Reason.INADMISSIBLE, f"ResourceFlavor {missing} does not exist")
    elif clash:
        state = _denied(Reason.INADMISSIBLE, clash)
    else:
        state = _reserved(run)
    is_left = not state.is_reserved and not observed.has_no_pods
    if not is_queueable(run, observed):
        name = run.spec.scheduling.workload_priority_class_name
        words = f"WorkloadPriorityClass {name} does not exist"
        state = state._replace(reason=Reason.INADMISSIBLE, message=words)
    return state._replace(is_evicted=is_left, flavors=flavors)


def _node_flavors(
    live: Manifest | None, assigned: Mapping[str, tuple[str, ...]], observed: ObservedRun
) -> tuple[dict[str, NodeFlavor], str]:
    """The node flavor of each role's pods, and the last conflict with an admission check.

    Source: Kueue's PodSetInfo (pkg/podset): flavors first, then the updates of admission checks,
    which must not contradict them.
    """
    updates = kueue.pod_set_updates(live) if live is not None else {}
    placed, clash = {}, ""
    for role, names in assigned.items():
        flavor = kueue.merge_flavors(
            kueue.node_flavor(observed.queue.flavors[name])
            for name in names
            if name in observed.queue.flavors
        )
        for update in updates.get(role, ()):
            for key in kueue.conflicting_keys(flavor, update):
                clash = f"an admission check contradicts the flavor's {key} for role {role}"
            flavor = kueue.merge_flavors([flavor, update])
        placed[role] = flavor
    return placed, clash


def _denied(reason: Reason, message: str) -> QuotaState:
    return QuotaState(is_reserved=False, reason=reason, message=message)


def _reserved(run: RLRun) -> QuotaState:
    message = f"LocalQueue {run.spec.scheduling.queue_name} has admitted the run"
    return QuotaState(is_reserved=True, reason=Reason.QUOTA_RESERVED, message=message)


def _waiting(run: RLRun, workload: Manifest | None = None) -> QuotaState:
    """A run before its first admission, or after an eviction."""
    queue = f"LocalQueue {run.spec.scheduling.queue_name}"
    reserved = condition(workload or {}, QUOTA_RESERVED)
    evicted = condition(workload or {}, "Evicted")
    if reserved.get("reason") == Reason.INADMISSIBLE:
        return _denied(Reason.INADMISSIBLE, f"{queue}: {reserved.get('message', '')}")
    if _had_quota(run) or evicted.get("status") == "True":
        words = f"{queue} evicted the run; it waits to be admitted again"
        because = evicted.get("message") or evicted.get("reason") or ""
        return _denied(Reason.EVICTED, f"{words}: {because}" if because else words)
    waits = f"{queue} has not admitted the run yet"
    because = reserved.get("message", "")
    return _denied(Reason.WAITING_FOR_QUOTA, f"{waits}: {because}" if because else waits)


def _had_quota(run: RLRun) -> bool:
    """The queue had admitted the run before it began to wait again."""
    before = next((c for c in run.status.conditions if c.type == QUOTA_RESERVED), None)
    return before is not None and (before.status == "True" or before.reason == Reason.EVICTED)


def queue_priority(run: RLRun, observed: ObservedRun) -> QueuePriority | None:
    """The run's WorkloadPriorityClass, else the PriorityClass of its pods; None without either."""
    name = run.spec.scheduling.workload_priority_class_name
    if name is None:
        return _pod_priority(run, observed)
    value = observed.queue.priorities.get(name)
    if value is None:
        return None
    return QueuePriority("kueue.x-k8s.io", "WorkloadPriorityClass", name, value)


def _pod_priority(run: RLRun, observed: ObservedRun) -> QueuePriority | None:
    """The class of the first role that has one, else that of pods without one."""
    name = next(
        filter(None, (_priority_class(run, role) for role in run_spec.pods_by_role(run))), None
    )
    for known in observed.queue.pod_priorities:
        itself = known["metadata"]["name"]
        if itself == name or (name is None and known.get("globalDefault", False)):
            return QueuePriority("scheduling.k8s.io", "PriorityClass", itself, known["value"])
    return None


def _priority_class(run: RLRun, role: str) -> str | None:
    """The PriorityClass of a role's pods; podTemplate overrides win."""
    spec = run_spec.role_spec(run, role)
    override = spec.pod_template.spec.get("priorityClassName")
    return (
        str(override) if override else pod_overrides.pod_classes(run, spec).get("priorityClassName")
    )


def workload_updates(
    run: RLRun, observed: ObservedRun, now: ClockReading, ending: ConditionFact | None
) -> Iterator[WriteStatus]:
    """Status writes that the Workload does not show yet.

    Args:
        run: the run.
        observed: its observed state.
        now: both clocks.
        ending: Complete or Failed, once the run is over.
    """
    live = observed.children.get(kueue.workload_ref(run))
    if live is None or is_deleting(live) or is_true(live, "Finished"):
        return
    if ending is not None:
        reason = "Succeeded" if ending.type == "Complete" else "Failed"
        yield _write_conditions(
            live, [true_condition("Finished", reason, ending.message or ending.reason)], now
        )
    elif is_true(live, "Evicted") and is_true(live, "QuotaReserved") and observed.has_no_pods:
        yield _write_conditions(
            live, _eviction_conditions(condition(live, "Evicted")), now, without="admission"
        )
    else:
        fact = _readiness(live, are_ready=_are_ready(run, observed))
        if fact is not None:
            yield _write_conditions(live, [fact], now)


def _eviction_conditions(evicted: Mapping[str, str]) -> list[ConditionFact]:
    """Conditions that give the quota of an evicted Workload back."""
    why = evicted.get("message") or ""
    reason = evicted.get("reason") or "Evicted"
    return [
        false_condition("QuotaReserved", "Pending", why),
        false_condition("Admitted", "NoReservation", "The workload has no reservation"),
        _not_ready("WaitForStart"),
        ConditionFact("Requeued", reason in REQUEUED_IMMEDIATELY, reason, why),
    ]


def _are_ready(run: RLRun, observed: ObservedRun) -> bool:
    attempts = transitions.attempts_of(run)
    return all(
        observed.num_ready(role, attempt=attempts.get(role, 0)) >= pods
        for role, pods in run_spec.pods_by_role(run).items()
    )


def _readiness(live: Manifest, *, are_ready: bool) -> ConditionFact | None:
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
        fact = true_condition(
            "PodsReady", "Recovered" if again else "Started", "All pods are ready"
        )
    is_known = (was_ready, reason) == (fact.holds, fact.reason)
    is_first = not before and not is_true(live, "Admitted")
    return None if is_known or is_first else fact


def _not_ready(reason: str) -> ConditionFact:
    return false_condition("PodsReady", reason, "Not all pods are ready")


def _write_conditions(
    live: Manifest, facts: list[ConditionFact], now: ClockReading, *, without: str = ""
) -> WriteStatus:
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
    others = {name: part for name, part in status.items() if name != without}
    return WriteStatus(observed=live, status={**others, "conditions": list(conditions.values())})
