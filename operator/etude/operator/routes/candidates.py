"""Candidates of a route: the checkpoint to evaluate, and the EvalRuns of it and of its baseline."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from etude.common.api.evaluation.spec import (
    EvalRunSpec,
    EvaluationComparison,
    EvaluationMargin,
    EvaluationPlan,
)
from etude.common.api.kinds import Checkpoint, EvalRun, PolicyRoute
from etude.common.api.meta import API_VERSION, NameRef
from etude.common.api.route.release import GATE_METRICS
from etude.common.api.route.status import EvaluatedCandidate
from etude.common.weights import VersionId
from etude.operator import names
from etude.operator.builders.workload import canonical_json, object_head, owner_labels
from etude.operator.checkpoints.status import is_ready
from etude.operator.conditions import is_condition_true
from etude.operator.evaluations.status import COMPLETE, is_over
from etude.operator.manifests import Manifest
from etude.operator.runs.checkpoints.start_weights import REASONS_WITH_MODEL
from etude.v1 import release_pb2

CANDIDATE_REASONS = frozenset(REASONS_WITH_MODEL) - {"Imported"}
"""Reasons of checkpoints that are candidates: those at an end, or that a person asked for."""


class Position(NamedTuple):
    """Place of a version in the run: a run that resumes an older checkpoint has a new branch."""

    branch: int
    number: int


def position_of(checkpoint: Checkpoint) -> Position:
    """Place of the version that a checkpoint holds."""
    saved = checkpoint.saved_state
    return Position(saved.branch, saved.policy_version)


def find_checkpoint(
    checkpoints: Iterable[Checkpoint], served: release_pb2.ServedPolicyVersion
) -> Checkpoint | None:
    """The Checkpoint of a version: the named one, or else one with its number."""
    holding = [
        each
        for each in checkpoints
        if is_ready(each) and position_of(each).number == served.version.number
    ]
    named = [each for each in holding if each.metadata.name == served.checkpoint]
    newest = max((position_of(each).branch for each in holding), default=0)
    others = [each for each in holding if position_of(each).branch == newest]
    return next(iter(named or _in_order(others)), None)


def find_candidates(
    checkpoints: Sequence[Checkpoint],
    stable: release_pb2.ServedPolicyVersion,
    tried: EvaluatedCandidate | None,
) -> list[Checkpoint]:
    """Checkpoints newer than the version in use and than the last one tried; the newest first.

    Of checkpoints with one version it is the first.
    """
    in_use = find_checkpoint(checkpoints, stable)
    floor = position_of(in_use) if in_use else Position(0, stable.version.number)
    if tried is not None and tried.action:
        floor = max(floor, Position(tried.branch, tried.number))
    found: dict[Position, Checkpoint] = {}
    for each in _in_order(checkpoints):
        is_candidate = is_ready(each) and each.spec.reason in CANDIDATE_REASONS
        if is_candidate and position_of(each) > floor:
            found.setdefault(position_of(each), each)
    return [found[position] for position in sorted(found, reverse=True)]


def _in_order(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    return sorted(checkpoints, key=lambda each: (each.saved_state.step, each.metadata.name))


def find_baseline(
    evaluations: Iterable[EvalRun], plan: EvaluationPlan, stable: release_pb2.ServedPolicyVersion
) -> EvalRun | None:
    """A finished evaluation of the version in use, also one that it was promoted by."""
    version = str(VersionId.from_proto(stable.version))
    fitting = [
        each
        for each in evaluations
        if is_condition_true(each.status.conditions, COMPLETE)
        and each.status.policy == version
        and each.status.results is not None
        and has_plan(each, plan)
    ]
    return min(fitting, key=lambda each: each.metadata.name, default=None)


def has_plan(evaluation: EvalRun, plan: EvaluationPlan) -> bool:
    """Return true if an evaluation has the suites and settings of a plan."""
    spec = evaluation.spec
    return all(getattr(spec, name) == getattr(plan, name) for name in EvaluationPlan.model_fields)


def is_under_way(evaluation: EvalRun) -> bool:
    """Return true if an evaluation has started, or has a result, and has not failed."""
    conditions = evaluation.status.conditions
    has_begun = evaluation.status.start_time is not None
    return has_begun and (not is_over(evaluation) or is_condition_true(conditions, COMPLETE))


def evaluation_manifest(
    route: PolicyRoute, plan: EvaluationPlan, checkpoint: Checkpoint, baseline: str | None
) -> Manifest:
    """The EvalRun of a checkpoint; equal arguments give the same name, so that it is made once.

    Args:
        route: its owner.
        plan: suites and settings.
        checkpoint: to be evaluated.
        baseline: EvalRun to compare with; None for that of the version in use.
    """
    fields = {name: getattr(plan, name) for name in EvaluationPlan.model_fields}
    spec = EvalRunSpec(
        **fields,
        checkpoint_ref=NameRef(name=checkpoint.metadata.name),
        comparison=None if baseline is None else _comparison(route, baseline),
    ).to_json()
    identity = [route.metadata.uid, checkpoint.metadata.uid, spec]
    digest = hashlib.sha256(canonical_json(identity).encode()).hexdigest()
    number = checkpoint.saved_state.policy_version
    name = names.evaluation(route.metadata.name, number, digest)
    head = object_head(route, API_VERSION, "EvalRun", name, owner_labels(route))
    return {**head, "spec": spec}


def _comparison(route: PolicyRoute, baseline: str) -> EvaluationComparison:
    gate = route.spec.gate
    found: dict[str, object] = {"baseline_ref": NameRef(name=baseline), "min_tasks": gate.min_tasks}
    if gate.margins is not None:
        found["margins"] = tuple(
            EvaluationMargin.model_validate(
                {"metric": GATE_METRICS[each.metric], "largestLoss": each.margin}
            )
            for each in gate.margins
        )
    return EvaluationComparison.model_validate(found)
