"""Acceptance of evaluations: the objects that one names, and the first finding against them."""

from collections.abc import Iterator

from etude.common.api.checkpoint.spec import CheckpointSource
from etude.common.api.kinds import Checkpoint, EvalRun, RLRun
from etude.common.api.lint.messages import abbreviate_names
from etude.common.api.storage import Storage
from etude.operator.builders.platform import Platform
from etude.operator.checkpoints.status import is_ready
from etude.operator.conditions import (
    ACCEPTED,
    ConditionFact,
    false_condition,
    is_condition_true,
)
from etude.operator.evaluations.children import EvaluationInputs
from etude.operator.evaluations.observe import ObservedEvaluation
from etude.operator.evaluations.status import COMPLETE
from etude.operator.integrations import cert_manager
from etude.operator.reasons import Reason


def resolve_inputs(
    evaluation: EvalRun, observed: ObservedEvaluation, platform: Platform
) -> EvaluationInputs | ConditionFact:
    """The objects that an evaluation needs, or why it cannot start yet."""
    checkpoint, run, baseline = observed.checkpoint, observed.run, observed.baseline
    if observed.namesake:
        what = f"metadata.name: there is an RLRun {evaluation.metadata.name} in this namespace"
        sentence = f"{what}, whose children have the same names: take another name"
        return false_condition(ACCEPTED, Reason.NAME_CONFLICT, sentence)
    named = evaluation.spec.checkpoint_ref
    sentence = "" if named is None else _checkpoint_problem(checkpoint)
    if named is not None and sentence:
        what = f"spec.checkpointRef.name: {named.name} {sentence}"
        return false_condition(ACCEPTED, Reason.CHECKPOINT_NOT_READY, what)
    if run is None:
        return false_condition(ACCEPTED, Reason.RUN_NOT_FOUND, _missing_run(evaluation))
    problem = cert_manager.cert_manager_problem(evaluation, platform.tls, observed.served)
    problem = problem or next(_problems(evaluation, observed, run, platform), None)
    if problem is not None:
        return problem
    return EvaluationInputs(
        run=run,
        source=None if checkpoint is None else _source(checkpoint),
        baseline=baseline.status.results if baseline is not None else None,
    )


def _source(checkpoint: Checkpoint) -> CheckpointSource:
    saved = checkpoint.saved_state
    return CheckpointSource(uri=saved.uri, manifest_digest=saved.manifest_digest)


def _missing_run(evaluation: EvalRun) -> str:
    named = evaluation.spec.run_ref
    if named is not None:
        return f"spec.runRef.name: no RLRun {named.name} in this namespace whose spec is valid"
    gone = "spec.checkpointRef: the run that wrote it is gone, and with it engine"
    return f"{gone}, rewards and store"


def _checkpoint_problem(checkpoint: Checkpoint | None) -> str:
    """The problem of the named checkpoint; empty where it is fine."""
    if checkpoint is None:
        return "does not exist in this namespace"
    if not is_ready(checkpoint):
        return f"is {checkpoint.status.phase or 'not verified yet'}, not Ready"
    if checkpoint.spec.run_ref is None:
        return "is imported and has no policy versions; name a checkpoint of a run"
    return ""


def _problems(
    evaluation: EvalRun, observed: ObservedEvaluation, run: RLRun, platform: Platform
) -> Iterator[ConditionFact]:
    for sentence in _run_problems(evaluation, run, platform):
        yield false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, sentence)
    yield from _pool_problems(evaluation, observed)
    if not platform.has_shared_files:
        yield from _store_problems(evaluation, observed, run)
    yield from _baseline_problems(evaluation, observed, run.spec.storage)


def _run_problems(evaluation: EvalRun, run: RLRun, platform: Platform) -> Iterator[str]:
    is_served = evaluation.spec.endpoint is None
    of_run = f"spec.{'checkpointRef' if is_served else 'runRef'}: run {run.metadata.name}"
    if is_served and run.spec.roles.inference is None:
        yield f"{of_run} has no roles.inference, which serves its policy"
    if run.spec.roles.rewards is None:
        yield f"{of_run} has no roles.rewards, which grades"
    if run.spec.storage.uri.startswith("file://") and not platform.has_shared_files:
        yield f"{of_run} has a storage.uri of this host: pods share no folders"


def _pool_problems(evaluation: EvalRun, observed: ObservedEvaluation) -> Iterator[ConditionFact]:
    for index, each in enumerate(evaluation.spec.environments):
        at, name = f"spec.environments[{index}]", each.pool_ref.name
        pool = observed.pools.get(each.name)
        if pool is None:
            what = f"{at}.poolRef.name: no EnvPool {name} in this namespace whose spec is valid"
            yield false_condition(ACCEPTED, Reason.POOL_NOT_FOUND, what)
            continue
        if pool.run:
            what = f"{at}.poolRef.name: {name} belongs to run {pool.run}, which it serves alone"
            yield false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, what)
        known = [template.name for template in pool.spec.templates]
        if each.template not in known:
            listed = f"EnvPool {name}.templates: {abbreviate_names(known)}"
            what = f"{at}.template: {each.template} is not in {listed}"
            yield false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, what)


def _store_problems(
    evaluation: EvalRun, observed: ObservedEvaluation, run: RLRun
) -> Iterator[ConditionFact]:
    """Pools whose hosts would ask another store for the tasks, or ask without credentials."""
    storage = run.spec.storage
    for index, each in enumerate(evaluation.spec.environments):
        pool = observed.pools.get(each.name)
        read = [s.uri for s in evaluation.spec.suites if s.environment == each.name]
        reads_store = any(uri.startswith("s3://") for uri in read)
        if pool is None or pool.spec.store is not None or not reads_store:
            continue
        if storage.endpoint is not None or storage.secret_ref is not None:
            at, name = f"spec.environments[{index}].poolRef.name", each.pool_ref.name
            what = f"{at}: EnvPool {name} has no spec.store, and its hosts cannot read {read[0]}"
            fix = f"give it endpoint, region and secretRef of run {run.metadata.name}'s storage"
            yield false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, f"{what}: {fix}")


def _baseline_problems(
    evaluation: EvalRun, observed: ObservedEvaluation, storage: Storage
) -> Iterator[ConditionFact]:
    comparison, baseline = evaluation.spec.comparison, observed.baseline
    if comparison is None:
        return
    at, name = "spec.comparison.baselineRef.name", comparison.baseline_ref.name
    if baseline is None:
        sentence = f"{at}: no EvalRun {name} in this namespace whose spec is valid"
        yield false_condition(ACCEPTED, Reason.WAITING_FOR_BASELINE, sentence)
    elif not is_condition_true(baseline.status.conditions, COMPLETE):
        phase = baseline.status.phase or "Pending"
        sentence = f"{at}: {name} is {phase}, not Complete"
        yield false_condition(ACCEPTED, Reason.WAITING_FOR_BASELINE, sentence)
    elif baseline.status.results is None or _access(baseline.status.results) != _access(storage):
        sentence = f"{at}: the store of {name} has another endpoint, region or secretRef"
        yield false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, sentence)


def _access(storage: Storage) -> Storage:
    """The storage without its location."""
    return storage.model_copy(update={"uri": ""})
