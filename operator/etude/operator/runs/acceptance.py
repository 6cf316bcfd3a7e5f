"""Acceptance of runs: checks beyond the schema, each finding with a suggested fix."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from pydantic import JsonValue

from etude.common.api.kinds import RLRun
from etude.common.api.lint.messages import abbreviate_names
from etude.common.api.lint.operator_rules import UNCOUNTED, UNCOUNTED_FIX
from etude.common.api.run.algorithms import check_algorithm
from etude.common.api.run.curriculum import can_check_curriculum, check_curriculum
from etude.common.api.run.phases import Phase
from etude.common.api.run.rewards import can_check, check_function
from etude.common.api.run.router_replay import (
    find_balance_problem,
    find_engine_problem,
    find_replay_problem,
)
from etude.common.api.run.status import RLRunStatus
from etude.operator.actions import ClockReading
from etude.operator.builders import pod_overrides, run_spec
from etude.operator.builders.platform import Platform
from etude.operator.clock import rfc3339
from etude.operator.conditions import ACCEPTED, ConditionFact, false_condition, merge_conditions
from etude.operator.integrations import apis, cert_manager
from etude.operator.pools.acceptance import driver_problem
from etude.operator.reasons import Reason
from etude.operator.runs.capacity import idle_roles
from etude.operator.runs.checkpoints import resume, start_weights
from etude.operator.runs.observe import ObservedRun

Parameters = Mapping[str, JsonValue]


def run_problem(run: RLRun, observed: ObservedRun, platform: Platform) -> ConditionFact | None:
    """The first finding against a run."""
    for need in apis.run_needs(run):
        missing = apis.need_problem(need, platform.integrations, observed.served)
        if missing is not None:
            return missing
    problem = _name_problem(run, observed) or cert_manager.cert_manager_problem(
        run, platform.tls, observed.served
    )
    if problem is not None:
        return problem
    sentence = idle_roles.idle_roles_problem(run)
    if sentence:
        return false_condition(ACCEPTED, Reason.FIXED_ROLES_REQUIRED, sentence)
    for message in _wrong_parameters(run, platform):
        return false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, message)
    sentence = start_weights.start_weights_problem(run, observed.model) or resume.resume_problem(
        run, observed.checkpoints
    )
    if sentence:
        return false_condition(ACCEPTED, Reason.CHECKPOINT_NOT_READY, sentence)
    return next(_wrong_pools(run, observed, platform), None)


def _name_problem(run: RLRun, observed: ObservedRun) -> ConditionFact | None:
    if not observed.has_namesake or run.status.resolved is not None:
        return None
    what = f"metadata.name: there is an EvalRun {run.metadata.name} in this namespace"
    sentence = f"{what}, whose children have the same names: delete it, or take another name"
    return false_condition(ACCEPTED, Reason.NAME_CONFLICT, sentence)


def _wrong_parameters(run: RLRun, platform: Platform) -> Iterator[str]:
    if run.spec.storage.uri.startswith("file://") and not platform.has_shared_files:
        yield "spec.storage.uri: pods share no folders; use s3://bucket/prefix"
    for index, phase in enumerate(run.spec.phases):
        yield from _wrong_phase(run, phase, f"spec.phases[{index}]")
    rewards = run.spec.roles.rewards
    for index, part in enumerate(rewards.functions if rewards else ()):
        at = f"spec.roles.rewards.functions[{index}].parameters"
        if can_check(part.function):  # the reward service has the packages of its own image
            yield from _check_parameters(at, check_function, part.function, part.parameters)
    yield from _uncounted_budget(run)
    for role in run_spec.pods_by_role(run):
        at = f"spec.roles.{role}"
        yield from pod_overrides.override_problems(run_spec.role_spec(run, role), role, at)


def _wrong_phase(run: RLRun, phase: Phase, at: str) -> Iterator[str]:
    has_lora = run.spec.roles.trainer.lora is not None
    problem = find_balance_problem(phase.optimizer.expert_bias_rate, has_lora=has_lora)
    if problem:
        yield f"{at}.optimizer.expertBiasRate: {problem}"
    if phase.algorithm is not None:
        name, parameters = phase.algorithm.name, phase.algorithm.parameters
        groups = None if phase.is_feedback else phase.algorithm.prompts_per_step
        check = partial(check_algorithm, prompts_per_step=groups)
        yield from _check_parameters(f"{at}.algorithm.parameters", check, name, parameters)
        yield from _wrong_replay(run, phase, f"{at}.routerReplay.mode")
    chosen = phase.curriculum  # the trainer's image may have packages that this one has not
    if chosen is not None and can_check_curriculum(chosen.name):
        at = f"{at}.curriculum"
        yield from _check_parameters(at, check_curriculum, chosen.name, chosen.parameters)


def _wrong_replay(run: RLRun, phase: Phase, at: str) -> Iterator[str]:
    replay, engines = phase.router_replay, run.spec.roles.inference
    if replay is None or phase.algorithm is None:
        return
    name, parameters = phase.algorithm.name, phase.algorithm.parameters
    problem = find_replay_problem(replay.mode, name, parameters)
    if replay.mode == "Recorded" and engines is not None:
        problem = problem or find_engine_problem(
            has_gpus=engines.has_gpus,
            pipeline=engines.engine.pipeline_parallel,
            copies=engines.engine.data_parallel,
            engine_args=engines.engine.engine_args,
        )
    if problem:
        yield f"{at}: {problem}"


def _check_parameters(
    at: str, check: Callable[[str, Parameters], object], name: str, parameters: Parameters
) -> Iterator[str]:
    try:
        check(name, parameters)
    except ValueError as error:
        yield f"{at}: {error}"


def _uncounted_budget(run: RLRun) -> Iterator[str]:
    """Budgets that would never be spent; a run that has started is not stopped by one."""
    if run.status.resolved is not None:
        return
    for role in run_spec.pods_by_role(run):
        spec = run_spec.role_spec(run, role)
        if run.spec.budget.gpu_hours and spec.resource_claims and not spec.gpus_per_replica:
            problem = f"{UNCOUNTED}, and roles.{role} has no others; {UNCOUNTED_FIX}"
            yield f"spec.budget.gpuHours: {problem}"


def _wrong_pools(run: RLRun, observed: ObservedRun, platform: Platform) -> Iterator[ConditionFact]:
    for index, role in enumerate(run.spec.roles.environments):
        at = f"spec.roles.environments[{index}]"
        template = role.pool_template
        if role.pool_ref is not None:
            pool = observed.pools.get(role.name)
            if pool is None:
                message = (
                    f"{at}.poolRef.name: no EnvPool {role.pool_ref.name} in this namespace"
                    " whose spec is valid"
                )
                yield false_condition(ACCEPTED, Reason.POOL_NOT_FOUND, message)
                continue
            template = pool.spec
        elif template is not None:
            problem = driver_problem(template, platform, at=f"{at}.poolTemplate")
            if problem is not None:
                yield problem
        known = [t.name for t in template.templates] if template is not None else []
        if role.template not in known:
            whose = f"EnvPool {role.pool_ref.name}" if role.pool_ref is not None else "poolTemplate"
            listed = f"{whose}.templates: {abbreviate_names(known)}"
            message = f"{at}.template: {role.template} is not in {listed}"
            yield false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, message)


def lacks_workload_api(run: RLRun, problem: ConditionFact) -> bool:
    """A started run depends on an API that the cluster does not serve."""
    return run.status.resolved is not None and apis.affects_pods(problem)


def status_without_api(run: RLRun, problem: ConditionFact, now: ClockReading) -> RLRunStatus:
    """The last status with the condition about the missing API."""
    others = [c for c in run.status.conditions if c.type != problem.type]
    current = merge_conditions(
        [problem],
        run.status.conditions,
        generation=run.metadata.generation,
        now=rfc3339(now.wall_s),
    )
    return run.status.model_copy(update={"conditions": (*current, *others)})
