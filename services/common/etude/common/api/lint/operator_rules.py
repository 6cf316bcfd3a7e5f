"""Rules of the operator that a manifest alone can break, though the API server takes it.

What it reads is whatever stands in the file: fields that are wrong otherwise are passed over.
"""

import re
from collections.abc import Iterator

from pydantic import JsonValue

from etude.common.api.lint.messages import FieldMessage, abbreviate_names, dotted
from etude.common.api.pool import cron
from etude.common.api.run.phase_rules import PROMPTS_PER_STEP
from etude.common.api.run.pod_template import (
    directive_errors,
    duplicate_errors,
    host_access_errors,
    is_reserved,
    shape_errors,
    variable_names,
)
from etude.common.api.run.router_replay import find_engine_problem, find_replay_problem
from etude.common.api.yaml_documents import FieldPath

ROLES = ("trainer", "inference", "rewards")
UNCOUNTED = "GPUs that come by resourceClaims are not counted"
UNCOUNTED_FIX = "remove it and set deadlines.activeSeconds, or ask for GPUs by gpusPerReplica"


def pool_refusals(spec: JsonValue, at: FieldPath = ("spec",)) -> Iterator[FieldMessage]:
    """Everything of a pool's spec that would end as `Accepted=False`, with its place."""
    scaling = _mapping(_mapping(spec).get("autoscaling"))
    for index, item in enumerate(_list(scaling.get("schedule"))):
        entry = _mapping(item)
        expression, zone = entry.get("cron"), entry.get("timeZone", "UTC")
        if isinstance(expression, str) and isinstance(zone, str):
            found = cron.find_problem(expression, zone)
            if found is not None:
                path = (*at, "autoscaling", "schedule", index, found.field)
                yield FieldMessage(path, f"{dotted(path)}: {found.what}", found.fix)


def run_refusals(spec: JsonValue) -> Iterator[FieldMessage]:
    """Everything of a run's spec that would end as `Accepted=False`, with its place."""
    roles = _mapping(_mapping(spec).get("roles"))
    for name in ROLES:
        role = _mapping(roles.get(name))
        at = ("spec", "roles", name)
        yield from _reserved(role, at)
        yield from _overrides(_mapping(_mapping(role.get("podTemplate")).get("spec")), name, at)
        if _is_uncounted(role) and _mapping(_mapping(spec).get("budget")).get("gpuHours"):
            path = ("spec", "budget", "gpuHours")
            what = f"{dotted(path)}: {UNCOUNTED}, and roles.{name} has no others"
            yield FieldMessage(path, what, UNCOUNTED_FIX)
    for index, item in enumerate(_list(_mapping(spec).get("phases"))):
        yield from _too_many_updates(_mapping(item), ("spec", "phases", index))
        engines = _mapping(roles.get("inference"))
        yield from _wrong_replay(_mapping(item), engines, ("spec", "phases", index))
    for index, item in enumerate(_list(roles.get("environments"))):
        place = ("spec", "roles", "environments", index)
        yield from _unknown_template(_mapping(item), place)
        yield from pool_refusals(_mapping(item).get("poolTemplate"), (*place, "poolTemplate"))


def route_refusals(spec: JsonValue) -> Iterator[FieldMessage]:
    """Everything of a route's spec that would end as `Accepted=False`, with its place."""
    for name, item in _mapping(_mapping(spec).get("channels")).items():
        engines, at = _mapping(item), ("spec", "channels", name)
        yield from _reserved(engines, at)
        yield from _overrides(_mapping(_mapping(engines.get("podTemplate")).get("spec")), name, at)


def _is_uncounted(role: dict[str, JsonValue]) -> bool:
    """True if only the allocator of resource claims knows the devices of a role."""
    return bool(_list(role.get("resourceClaims"))) and not role.get("gpusPerReplica")


def _too_many_updates(phase: dict[str, JsonValue], at: FieldPath) -> Iterator[FieldMessage]:
    algorithm = _mapping(phase.get("algorithm"))
    updates = _mapping(algorithm.get("parameters")).get("updatesPerBatch")
    groups = algorithm.get("promptsPerStep", PROMPTS_PER_STEP)
    if phase.get("type") != "ReinforcementLearning":
        return
    if isinstance(updates, int) and isinstance(groups, int) and updates > groups:
        path = (*at, "algorithm", "parameters", "updatesPerBatch")
        what = f"{dotted(path)}: {updates} updates cannot share {groups} groups"
        yield FieldMessage(path, what, f"write {groups} or less, or raise promptsPerStep")


def _wrong_replay(
    phase: dict[str, JsonValue], engines: dict[str, JsonValue], at: FieldPath
) -> Iterator[FieldMessage]:
    replay, algorithm = phase.get("routerReplay"), _mapping(phase.get("algorithm"))
    if not isinstance(replay, dict):
        return
    mode, settings = str(replay.get("mode", "Recorded")), _mapping(engines.get("engine"))
    name, parameters = algorithm.get("name", "DrGRPO"), _mapping(algorithm.get("parameters"))
    problem = find_replay_problem(mode, str(name), parameters)
    if mode == "Recorded":
        problem = problem or find_engine_problem(
            has_gpus=bool(engines.get("gpusPerReplica") or engines.get("resourceClaims")),
            pipeline=_count(settings.get("pipelineParallel")),
            copies=_count(settings.get("dataParallel")),
            engine_args=_mapping(settings.get("engineArgs")),
        )
    if problem:
        path = (*at, "routerReplay", "mode")
        what, _, fix = problem.rpartition("; ")
        yield FieldMessage(path, f"{dotted(path)}: {what}", fix)


def _count(value: JsonValue) -> int:
    return value if isinstance(value, int) else 1


def _reserved(role: dict[str, JsonValue], at: FieldPath) -> Iterator[FieldMessage]:
    for index, item in enumerate(_list(role.get("env"))):
        name = str(_mapping(item).get("name"))
        if is_reserved(name):
            yield _reserved_message((*at, "env", index, "name"), name)


def _overrides(spec: dict[str, JsonValue], role: str, at: FieldPath) -> Iterator[FieldMessage]:
    below = (*at, "podTemplate", "spec")
    for message in shape_errors(spec, role):
        yield _override_message(message, below, "correct it, or remove it")
    for message in (*directive_errors(spec), *host_access_errors(spec), *duplicate_errors(spec)):
        yield _override_message(message, below, "remove it")
    for name in variable_names(spec, role):
        if is_reserved(name):
            yield _reserved_message((*below, "containers"), name)


def _override_message(message: str, below: FieldPath, fix: str) -> FieldMessage:
    field, _, why = message.partition(": ")
    path = (*below, *_parts(field))
    return FieldMessage(path, f"{dotted(path)}: {why}", fix, at_key=True)


def _reserved_message(path: FieldPath, name: str) -> FieldMessage:
    return FieldMessage(path, f"{dotted(path)}: {name} is set by the operator", "remove it")


def _unknown_template(role: dict[str, JsonValue], at: FieldPath) -> Iterator[FieldMessage]:
    pool = _mapping(role.get("poolTemplate"))
    known = [str(_mapping(each).get("name")) for each in _list(pool.get("templates"))]
    wanted = role.get("template")
    if known and isinstance(wanted, str) and wanted not in known:
        path = (*at, "template")
        templates = abbreviate_names(known)
        what = f"{dotted(path)} is {wanted}, which is none of poolTemplate.templates: {templates}"
        yield FieldMessage(path, what, f"write template: {known[0]}, or add it to poolTemplate")


def _parts(field: str) -> FieldPath:
    """A path as it is written, `volumes[0].hostPath`, as its parts."""
    found = re.findall(r"([^.\[\]]+)|\[(\d+)\]", field)
    return tuple(name or int(index) for name, index in found)


def _mapping(value: JsonValue) -> dict[str, JsonValue]:
    return value if isinstance(value, dict) else {}


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []
