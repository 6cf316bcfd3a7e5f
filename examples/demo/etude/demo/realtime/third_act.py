"""Act 3: the gate stops a worse candidate, and users' complaints roll back one that passes it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blake3 import blake3

from etude.cli.releases.client import DecisionText, Evaluated
from etude.common.blobs import Store
from etude.common.experiments.assignment import MAX_SHARE, Arm, assign_arm
from etude.common.release.channels import CANARY, newest_record
from etude.demo.realtime import figures, serving
from etude.demo.realtime.candidates import SERVED, Candidates
from etude.demo.realtime.figures import ArmTruth, PromiseCheck, Say
from etude.demo.realtime.release_stage import ReleaseStage, serve_route
from etude.demo.realtime.warm_up import WarmPolicy
from etude.feedback.release.records import EVIDENCE, ReleaseRecord, read_release
from etude.feedback.simulate.population import Visit

MOST_ROUNDS = 3
"""Of visits, in which the canary must end."""
NUM_PROBES = 3
"""Users with the candidate who are asked which version serves them."""


class Evaluating(NamedTuple):
    """Evaluations of the two candidates against the version in use, one after the other."""

    candidates: Candidates
    damaged: "asyncio.Task[Evaluated]"
    asking: "asyncio.Task[Evaluated]"


def start_evaluations(candidates: Candidates) -> Evaluating:
    """Start to evaluate both candidates; a failed evaluation is raised to whoever awaits it."""
    one_at_a_time = asyncio.Lock()  # the runtime holds the folder

    async def evaluate(checkpoint: str, name: str) -> Evaluated:
        # An EvalRun has one result: those of earlier demos stay beside it.
        unique = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        async with one_at_a_time:
            return await asyncio.to_thread(candidates.evaluate, checkpoint, unique, baseline=SERVED)

    return Evaluating(
        candidates=candidates,
        damaged=asyncio.create_task(evaluate(candidates.damaged, "damaged")),
        asking=asyncio.create_task(evaluate(candidates.asking, "asking")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThirdAct:
    """Figures of the act."""

    gate_stopped: int
    canary_rolled_back: int
    rollback_s: float | None
    """From the decision until all users had the version in use again; None if that never came."""
    num_requests: int
    num_failed: int
    num_retried: int
    arms: tuple[ArmTruth, ...]
    """Of the canary's users; none if it did not end."""
    checks: tuple[PromiseCheck, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryEnd:
    """The end of a canary, as its users saw it."""

    decision: ReleaseRecord
    rollback_s: float
    visits: Sequence[Visit]


async def play_third_act(
    stage: ReleaseStage, policy: WarmPolicy, evaluating: Evaluating, say: Say
) -> ThirdAct:
    """Propose a damaged candidate, and then one that asks endlessly.

    Raises:
        UserError: a part does not start, or an evaluation failed.
    """
    refusal = await stage.propose(await evaluating.damaged)
    say(f"gate: {refusal.sentence}")
    is_tried = newest_record(stage.store, CANARY) is not None
    asking = await evaluating.asking
    async with serve_route(stage, policy):
        say(f"version {stage.served} is served at {stage.processes.gateway_url}/v1")
        start = await stage.propose(asking)
        say(f"gate: {start.sentence}")
        end = await _try_with_users(stage, start, say)
        await stage.visitors.load.stop()
        return _measure(stage, end, check_gate(refusal, start, is_tried=is_tried))


async def _try_with_users(stage: ReleaseStage, start: DecisionText, say: Say) -> CanaryEnd | None:
    """Let users come until the canary ends; None if there is none, or it does not end."""
    if start.action != "StartCanary":
        return None
    await stage.await_share(is_zero=False)
    watch = asyncio.create_task(_watch_end(stage, say), name="end of the canary")
    visits: list[Visit] = []
    try:
        for number in range(1, MOST_ROUNDS + 1):
            visits += await stage.visitors.population.visit()
            say(f"round {number}: {describe_versions(visits, stage.served)}")
            done, _ = await asyncio.wait({watch}, timeout=2 * stage.settings.horizon_s)
            if done:
                decision, rollback_s = watch.result()
                return CanaryEnd(decision=decision, rollback_s=rollback_s, visits=visits)
    finally:
        watch.cancel()
    return None


async def _watch_end(stage: ReleaseStage, say: Say) -> tuple[ReleaseRecord, float]:
    """Wait for the end of the canary, and until its users have the version in use."""
    status = await stage.releases.read_status()
    users = find_treated(
        status.canary.experiment, _read_salt(stage.store), sorted(stage.visitors.refusing)
    )[:NUM_PROBES]
    decision = await stage.await_end_of_canary()
    say(f"canary: {decision.sentence}")
    await stage.await_share(is_zero=True)
    is_back = False
    while not is_back:
        is_back = all([await stage.ask_version(user) == stage.served for user in users])
    rollback_s = time.time() - decision.decided_ms / 1_000
    say(f"version {stage.served} serves everyone {rollback_s:.1f} s after the decision")
    return decision, rollback_s


def _read_salt(store: Store) -> str:
    record = newest_record(store, CANARY)
    return record.experiment.salt if record and record.experiment else ""


def find_treated(experiment: str, salt: str, users: Sequence[str]) -> list[str]:
    """Users who have the candidate once everyone is exposed, as the gateway assigns them."""
    return [
        user
        for user in users
        if assign_arm(experiment, salt, f"{serving.TENANT}/{user}", MAX_SHARE) is Arm.TREATMENT
    ]


def measure_arms(visits: Sequence[Visit], served: str) -> tuple[ArmTruth, ...]:
    """Measure how many users of each version complained, in truth."""
    groups = (
        ("the version in use", [v for v in visits if v.conversation.version == served]),
        ("the candidate", [v for v in visits if v.conversation.version not in {served, ""}]),
    )
    return tuple(
        ArmTruth(name, len(group), figures.sum_ratio(group, figures.complaints))
        for name, group in groups
    )


def describe_versions(visits: Sequence[Visit], served: str) -> str:
    """Describe how many users of each version complained, in truth."""
    return ", ".join(
        f"{arm.num_visits} visits of {arm.name} with complaints {arm.complaints:.3f}"
        for arm in measure_arms(visits, served)
    )


def check_gate(
    refusal: DecisionText, start: DecisionText, *, is_tried: bool
) -> tuple[PromiseCheck, PromiseCheck]:
    """Check that the gate stopped the one candidate, whom no user had, and not the other."""
    is_stopped = refusal.action == "Refuse" and "stopped by the gate" in refusal.sentence
    return (
        PromiseCheck("P6", refusal.sentence, is_stopped and not is_tried),
        PromiseCheck("P6", start.sentence, start.action == "StartCanary"),
    )


def check_rollback(decision: ReleaseRecord | None) -> PromiseCheck:
    """Check that a guardrail ended the canary, and no lack of data or person did."""
    if decision is None:
        return PromiseCheck("P6", "the canary did not end", is_held=False)
    is_held = decision.action == "Rollback" and decision.sentence.startswith(
        "rolled back: complaints"
    )
    return PromiseCheck("P6", decision.sentence, is_held)


def check_evidence(store: Store, last: int) -> PromiseCheck:
    """Check that each decision has a sentence, and its figures by digest."""
    lacking = 0
    for number in range(1, last + 1):
        record = read_release(store, number)
        data = store.get(f"{EVIDENCE}{record.evidence}.json")
        lacking += not record.sentence or blake3(data).hexdigest() != record.evidence
    what = f"{last} decisions, {lacking} without a sentence or evidence"
    return PromiseCheck("P8", what, not lacking)


def _measure(
    stage: ReleaseStage, end: CanaryEnd | None, gate: tuple[PromiseCheck, PromiseCheck]
) -> ThirdAct:
    population, load = stage.visitors.population, stage.visitors.load
    num_requests = population.num_requests + load.num_requests + stage.num_probes
    num_retried = stage.processes.count_requests() - num_requests
    num_failed = population.num_failed + load.num_failed + stage.num_failed_probes
    rollback = check_rollback(end.decision if end else None)
    checks = [
        *gate,
        rollback,
        PromiseCheck("P1", f"{num_failed} of {num_requests} requests failed", not num_failed),
        PromiseCheck("P1", f"{num_retried} requests retried", not num_retried),
    ]
    if end is not None:
        checks.append(check_evidence(stage.store, end.decision.number))
    return ThirdAct(
        gate_stopped=int(gate[0].is_held),
        canary_rolled_back=int(rollback.is_held),
        rollback_s=end.rollback_s if end else None,
        num_requests=num_requests,
        num_failed=num_failed,
        num_retried=num_retried,
        arms=measure_arms(end.visits, stage.served) if end else (),
        checks=tuple(checks),
    )
