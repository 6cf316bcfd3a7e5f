"""`kubectl etude why` has an answer to every reason, and each answer leads somewhere."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.kube import observed_runs
from tests.support.kube.observed_runs import checkpoint, condition, event, pool, run, seen
from typer.main import get_command

from etude.cli.kubectl.diagnose.advice import ADVICE, CONTROLLERS_OWN, FOUND_HERE
from etude.cli.kubectl.diagnose.diagnosis import Diagnosis, RunState
from etude.cli.kubectl.diagnose.run_objects import RunObjects
from etude.cli.kubectl.diagnose.why import diagnose
from etude.cli.kubectl.main import app
from etude.operator.reasons import Reason

ROOT = Path(__file__).parents[2]
WORDS = "what the operator says of it"
HERE = {"Progressing": ("False", Reason.WAITING_FOR_ROLES)}
"""A run that does not progress, so that what its parts say counts."""


def of_run(kind: str, status: str, reason: Reason) -> RunObjects:
    stuck = [condition(k, *what) for k, what in HERE.items() if k != kind]
    late = [] if kind in {"CheckpointHealthy", "Degraded"} else stuck
    return seen(run(*late, condition(kind, status, reason, WORDS)))


def of_pool(kind: str, status: str, reason: Reason) -> RunObjects:
    stuck = condition("Progressing", "False", Reason.WAITING_FOR_ENVIRONMENTS)
    unavailable = condition("Available", "False", Reason.POOL_WARMING)
    return seen(run(stuck), pool(unavailable, condition(kind, status, reason, WORDS)))


def leaving_checkpoint(reason: Reason) -> RunObjects:
    leaving = checkpoint(3, deletionTimestamp=observed_runs.before(60))
    leaving["status"] = {"conditions": [condition("Ready", "False", reason, WORDS)]}
    return seen(leaving_run(), leaving)


def leaving_run() -> observed_runs.Manifest:
    leaving = run()
    leaving["metadata"]["deletionTimestamp"] = observed_runs.before(60)
    return leaving


def rolled_back() -> RunObjects:
    left = run(phases=[{"name": "sft", "state": "OfTheFuture"}])
    return seen(left, events=[event(left, Reason.INVALID_STATUS, WORDS)])


def suspending() -> RunObjects:
    intent = {"type": "Suspend", "reason": "ByUser", "since": observed_runs.before(5)}
    return seen(run(condition("Suspended", "False", Reason.SUSPENDING, WORDS), intent=intent))


TROUBLE = {
    **{
        reason: of_run("Accepted", "False", reason)
        for reason in (
            *(Reason.INVALID_PARAMETERS, Reason.POOL_NOT_FOUND, Reason.NAME_CONFLICT),
            Reason.CHECKPOINT_NOT_READY,
            *(Reason.FEATURE_DISABLED, Reason.JOBSET_NOT_INSTALLED, Reason.KUEUE_NOT_INSTALLED),
            *(Reason.KUBERAY_NOT_INSTALLED, Reason.GATEWAY_API_NOT_INSTALLED),
            *(Reason.VOLCANO_NOT_INSTALLED, Reason.FIXED_ROLES_REQUIRED),
            Reason.CERT_MANAGER_NOT_INSTALLED,
            *(Reason.REFUSED, Reason.NAMESPACE_CLOSING, Reason.CLUSTER_UNAVAILABLE),
        )
    },
    **{
        reason: of_pool("Accepted", "False", reason)
        for reason in (
            Reason.WEAK_ISOLATION_NOT_ALLOWED,
            Reason.AGENT_SANDBOX_NOT_INSTALLED,
            Reason.SANDBOX_TEMPLATE_NOT_FOUND,
        )
    },
    **{
        reason: of_run("QuotaReserved", "False", reason)
        for reason in (Reason.WAITING_FOR_QUOTA, Reason.INADMISSIBLE, Reason.EVICTED)
    },
    Reason.UNSCHEDULABLE: of_run("PodsScheduled", "False", Reason.UNSCHEDULABLE),
    Reason.GANG_TIMEOUT: of_run("PodsScheduled", "False", Reason.GANG_TIMEOUT),
    **{
        reason: of_run("RolesReady", "False", reason)
        for reason in (Reason.PODS_NOT_READY, Reason.IMAGE_PULL_FAILED, Reason.CRASH_LOOPING)
    },
    Reason.POOL_WARMING: of_run("EnvironmentsReady", "False", Reason.POOL_WARMING),
    **{
        reason: of_pool("Available", "False", reason)
        for reason in (Reason.SCALED_TO_ZERO, Reason.BROKER_NOT_READY)
    },
    Reason.NODES_QUARANTINED: of_pool("Degraded", "True", Reason.NODES_QUARANTINED),
    Reason.DRIVER_UNAVAILABLE: of_pool("Degraded", "True", Reason.DRIVER_UNAVAILABLE),
    **{
        reason: of_run("Progressing", "False", reason)
        for reason in (
            *(Reason.LOADING, Reason.WAITING_FOR_ROLES, Reason.WAITING_FOR_ENVIRONMENTS),
            *(Reason.CONTROLLER_UNREACHABLE, Reason.WAITING_FOR_WINDOW),
        )
    },
    Reason.NO_PROGRESS: of_run("Stalled", "True", Reason.NO_PROGRESS),
    **{
        reason: of_run("CheckpointHealthy", "False", reason)
        for reason in (Reason.CORRUPT, Reason.STORAGE_UNAVAILABLE)
    },
    Reason.SUSPEND_TIMEOUT: seen(
        run(
            condition("Suspended", "True", Reason.BY_USER),
            condition("CheckpointHealthy", "False", Reason.SUSPEND_TIMEOUT, WORDS),
        )
    ),
    **{
        reason: of_run("Suspended", "True", reason)
        for reason in (
            *(Reason.BY_USER, Reason.BUDGET_EXCEEDED, Reason.FAILURE_RULE, Reason.GATE_NOT_MET),
            Reason.MONITOR_FROZE,
        )
    },
    Reason.SUSPENDING: suspending(),
    **{
        reason: of_run("Failed", "True", reason)
        for reason in (Reason.INVALID_SPEC, Reason.RESTARTS_EXHAUSTED, Reason.DEADLINE_EXCEEDED)
    },
    Reason.ROLE_FAILED: of_run("Degraded", "True", Reason.ROLE_FAILED),
    Reason.PLAN_UNRELIABLE: of_run("Degraded", "True", Reason.PLAN_UNRELIABLE),
    Reason.INVALID_STATUS: rolled_back(),
    Reason.DELETING: leaving_checkpoint(Reason.DELETING),
    Reason.DELETION_FAILED: leaving_checkpoint(Reason.DELETION_FAILED),
    Reason.DATA_ORPHANED: seen(
        leaving_run(), events=[event(checkpoint(3), Reason.DATA_ORPHANED, WORDS)]
    ),
}
"""Each reason that keeps somebody waiting, where it is seen."""
WELL = {
    *(
        Reason.ACCEPTED,
        Reason.QUOTA_RESERVED,
        Reason.SCHEDULED,
        Reason.PODS_READY,
        Reason.POOLS_AVAILABLE,
    ),
    *(Reason.NOT_NEEDED, Reason.CONTROLLER_CONNECTED, Reason.STEPS_FINISH, Reason.NODES_READY),
    *(Reason.CHECKPOINT_VERIFIED, Reason.NO_CHECKPOINT, Reason.VERIFYING, Reason.HEALTHY),
    *(Reason.NOT_SUSPENDED, Reason.NOT_FINISHED, Reason.BURST_FITS),
    # A pool that hands out environments all the same.
    *(Reason.BURST_TOO_LARGE, Reason.OVERPROVISIONED),
    # Of the conditions of a run that holds no pods; another condition says why it holds none.
    *(Reason.SUSPENDED, Reason.FINISHED, Reason.ALL_PHASES_DONE, Reason.TARGET_REACHED),
    # Of a checkpoint that somebody asked for; the run does not wait for it.
    *(Reason.WAITING_FOR_RUN, Reason.RUN_NOT_FOUND, Reason.WRITING, Reason.RUN_OVER),
    # Of kinds that no run waits for.
    *(Reason.SERVING, Reason.NOT_SERVING, Reason.WAITING_FOR_BASELINE),
    *(Reason.EVALUATING, Reason.EVALUATED, Reason.EVALUATION_FAILED),
    *(Reason.NO_NEW_CHECKPOINT, Reason.PROPOSED, Reason.NOT_AUTOMATIC, Reason.NO_STABLE_VERSION),
    *(Reason.NO_BASELINE, Reason.NOT_ENOUGH_DATA, Reason.GATE_REFUSED, Reason.PROPOSAL_REFUSED),
}
"""Reasons that keep nobody waiting."""


def answer(what: RunObjects) -> Diagnosis:
    return diagnose(what, observed_runs.NOW)


def test_every_reason_is_explained() -> None:
    assert set(Reason) == set(TROUBLE) | WELL
    assert not set(TROUBLE) & WELL
    assert {str(reason) for reason in Reason} <= set(ADVICE)
    assert all(each.means for each in ADVICE.values())


@pytest.mark.parametrize("reason", TROUBLE, ids=str)
def test_each_trouble_is_named_with_its_words_and_a_way_out(reason: Reason) -> None:
    found = answer(TROUBLE[reason])
    assert found.reason == reason
    assert found.cause
    assert WORDS in "\n".join(found.evidence)
    assert found.do
    assert "{" not in found.do
    assert found.state is not RunState.OVER or reason is Reason.DATA_ORPHANED


@pytest.mark.parametrize("of", [of_run, of_pool])
def test_a_spec_that_the_operator_cannot_read_is_no_role_that_failed(
    of: Callable[[str, str, Reason], RunObjects],
) -> None:
    found = answer(of("Accepted", "False", Reason.INVALID_SPEC))
    assert found.state is RunState.STANDS_STILL
    assert "the operator cannot read a field of the spec" in found.cause
    assert "the operator is older than the CRDs" in found.do
    assert "failed" not in found.cause + found.do
    assert WORDS in "\n".join(found.evidence)


@pytest.mark.parametrize(
    "reason", sorted(WELL - {Reason.FINISHED, Reason.ALL_PHASES_DONE, Reason.TARGET_REACHED})
)
def test_no_reason_of_a_run_that_is_well_is_taken_for_a_cause(reason: Reason) -> None:
    kinds = [kind for kind, (_, usual) in observed_runs.FINE.items() if usual == reason] or [
        "Accepted"
    ]
    changed = [condition(kind, observed_runs.FINE[kind][0], reason, WORDS) for kind in kinds]
    assert answer(seen(run(*changed))).state is RunState.PROGRESSES


def test_a_run_that_is_complete_needs_nothing() -> None:
    finished = [condition(kind, "False", Reason.FINISHED) for kind in ("RolesReady", "Progressing")]
    done = condition("Complete", "True", Reason.ALL_PHASES_DONE, "every phase is done")
    found = answer(seen(run(*finished, done)))
    assert (found.state, found.reason, found.do) == (RunState.OVER, "AllPhasesDone", "")


@pytest.mark.parametrize("reason", sorted(ADVICE))
def test_each_advice_leads_to_a_runbook_and_to_verbs_that_exist(reason: str) -> None:
    advice = ADVICE[reason]
    assert (ROOT / advice.runbook).is_file()
    verbs = getattr(get_command(app), "commands", {})
    named = re.findall(r"kubectl etude (\w+)", advice.do)
    assert set(named) <= set(verbs)


def test_the_codes_that_no_condition_has_are_in_the_docs() -> None:
    page = (ROOT / "docs" / "how-to" / "use-the-kubectl-plugin.md").read_text(encoding="utf-8")
    missing = [code for code in (*FOUND_HERE, *CONTROLLERS_OWN) if f"`{code}`" not in page]
    assert missing == []
