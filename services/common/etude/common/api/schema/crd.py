"""CustomResourceDefinitions, made from the API models."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etude.common.api import yaml_documents
from etude.common.api.checkpoint.spec import CheckpointSpec
from etude.common.api.checkpoint.status import CheckpointStatus
from etude.common.api.evaluation.spec import EvalRunSpec
from etude.common.api.evaluation.status import EvalRunStatus
from etude.common.api.meta import GROUP, NAME, VERSION, Model
from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.api.pool.status import EnvPoolStatus
from etude.common.api.route.spec import PolicyRouteSpec
from etude.common.api.route.status import PolicyRouteStatus
from etude.common.api.run.spec import RLRunSpec
from etude.common.api.run.status import RLRunStatus
from etude.common.api.schema.structural import VALIDATIONS, schema

CHART_FOLDER = Path("helm/etude/files/crds")
HEADER = (
    "# Generated from etude.common.api by `python -m etude.common.api.schema.crd`; do not edit.\n"
)


class PrinterColumn(NamedTuple):
    """One column of `kubectl get`; a wide one shows only with `-o wide`."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False


class RootRule(NamedTuple):
    """A rule about name or change, which only the API server can judge."""

    cel: str
    message: str
    field_path: str = ""
    message_cel: str = ""
    """What is said instead of the message, as an expression, where one rule guards many fields."""


class CrdKind(NamedTuple):
    """One kind of the group: its names, its models, and how kubectl shows it."""

    name: str
    plural: str
    short: str
    about: str
    spec: type[Model]
    status: type[Model]
    columns: tuple[PrinterColumn, ...]
    selectable: tuple[str, ...] = ()
    rules: tuple[RootRule, ...] = ()
    scales: bool = False


NAME_RULE = RootRule(
    cel=f"self.metadata.name.matches('{NAME}') && size(self.metadata.name) <= 40",
    message="metadata.name must be a lower-case RFC 1035 label of at most 40 characters:"
    " the names of all children are made from it",
)

HOLDS_PODS = (
    "has(oldSelf.status) && has(oldSelf.status.startTime)"
    " && !(has(oldSelf.status.conditions) && oldSelf.status.conditions"
    ".exists(c, c.type == 'Suspended' && c.status == 'True'))"
)
"""True from the start of a run until it is suspended. CRD rules have no variables."""


FROZEN = ("model", "storage", "phases", "roles", "weights", "scheduling")
"""Parts of a run that its processes read once, as they start, or that its pods were made by. The
rest reaches a running run."""


def _frozen_while_holding_pods() -> RootRule:
    """The rule that keeps those parts of the spec while the run holds pods.

    One for all: every write of a status evaluates every rule of the root, and looking up a field
    of the status is what costs (ADR 65).
    """
    same = " && ".join(f"self.spec.{field} == oldSelf.spec.{field}" for field in FROZEN)
    *others, last = FROZEN
    changed = [f"self.spec.{field} != oldSelf.spec.{field} ? '{field}' : " for field in others]
    why = "is immutable while the run holds pods:"
    fix = "set spec.suspend=true and wait for condition Suspended"
    return RootRule(
        cel=f"!({HOLDS_PODS}) || ({same})",
        message=f"each of {', '.join(f'spec.{field}' for field in FROZEN)} {why} {fix}",
        field_path=".spec",
        message_cel=f"'spec.' + ({''.join(changed)}'{last}') + ' {why} {fix}'",
    )


def unchanged(field: str, *, optional: bool = False) -> RootRule:
    """A rule that keeps one field of the spec as it was created."""
    now, before = f"self.spec.{field}", f"oldSelf.spec.{field}"
    same = f"{now} == {before}"
    return RootRule(
        cel=f"has({now}) == has({before}) && (!has({now}) || {same})" if optional else same,
        message=f"spec.{field} is immutable",
        field_path=f".spec.{field}",
    )


RLRUN = CrdKind(
    name="RLRun",
    plural="rlruns",
    short="rlr",
    about="One post-training run, from a model folder to a better policy.",
    spec=RLRunSpec,
    status=RLRunStatus,
    selectable=(".status.phase",),
    rules=(NAME_RULE, unchanged("managedBy"), _frozen_while_holding_pods()),
    columns=(
        PrinterColumn("Status", ".status.phase"),
        PrinterColumn("Phase", ".status.activePhase"),
        PrinterColumn("Step", ".status.step.text"),
        PrinterColumn("Reward", ".status.reward.ewma"),
        PrinterColumn("Policy", ".status.policyVersion"),
        PrinterColumn("Stale", ".status.staleness.max", "integer"),
        PrinterColumn("ETTR", ".status.ettr"),
        PrinterColumn("Ckpt", ".status.lastCheckpoint.time", "date"),
        PrinterColumn("Age", ".metadata.creationTimestamp", "date"),
        PrinterColumn("Ready", '.status.conditions[?(@.type=="Ready")].status', wide=True),
        PrinterColumn("GPUs", ".status.usage.gpus", "integer", wide=True),
        PrinterColumn("Queue", ".spec.scheduling.queueName", wide=True),
        PrinterColumn("Best", ".status.bestCheckpoint.name", wide=True),
        PrinterColumn("Envs", ".status.rollouts.inFlight", "integer", wide=True),
        PrinterColumn("Attempt", ".status.attempt", "integer", wide=True),
        PrinterColumn("Reason", '.status.conditions[?(@.type=="Ready")].reason', wide=True),
        PrinterColumn("Progress", '.status.conditions[?(@.type=="Progressing")].reason', wide=True),
    ),
)

CHECKPOINT = CrdKind(
    name="Checkpoint",
    plural="checkpoints",
    short="ckpt",
    about="One complete, verified state of a run in the object store.",
    spec=CheckpointSpec,
    status=CheckpointStatus,
    selectable=(".spec.runRef.name", ".status.phase"),
    rules=(
        unchanged("runRef", optional=True),
        unchanged("source", optional=True),
        unchanged("reason"),
        unchanged("parentRef", optional=True),
    ),
    columns=(
        PrinterColumn("Run", ".spec.runRef.name"),
        PrinterColumn("Step", ".status.step", "integer"),
        PrinterColumn("Policy", ".status.policyVersion", "integer"),
        PrinterColumn("Keyframe", ".status.keyframe", "integer"),
        PrinterColumn("Size", ".status.sizeBytes", "integer"),
        PrinterColumn("Phase", ".status.phase"),
        PrinterColumn("Pinned", ".spec.pinned", "boolean"),
        PrinterColumn("Age", ".metadata.creationTimestamp", "date"),
        PrinterColumn("Reason", ".spec.reason", wide=True),
        PrinterColumn("Parent", ".status.parentRef.name", wide=True),
        PrinterColumn("URI", ".status.uri", wide=True),
        PrinterColumn("Metrics", ".status.metrics", wide=True),
    ),
)

ENV_POOL = CrdKind(
    name="EnvPool",
    plural="envpools",
    short="envp",
    about="Environments of one kind, handed out as leases.",
    spec=EnvPoolSpec,
    status=EnvPoolStatus,
    rules=(
        NAME_RULE,
        unchanged("backend"),
    ),
    scales=True,
    columns=(
        PrinterColumn("Ready", ".status.readyReplicas", "integer"),
        PrinterColumn("Desired", ".status.desired", "integer"),
        PrinterColumn("Leased", ".status.slots.leased", "integer"),
        PrinterColumn("Idle", ".status.slots.idle", "integer"),
        PrinterColumn("Queued", ".status.slots.queued", "integer"),
        PrinterColumn("Mode", ".status.autoscaler.mode"),
        PrinterColumn("P99ms", ".status.leases.acquireP99Ms", "integer"),
        PrinterColumn("Age", ".metadata.creationTimestamp", "date"),
        PrinterColumn("Isolation", ".spec.isolation.minimum", wide=True),
        PrinterColumn("Driver", ".status.driver", wide=True),
        PrinterColumn("Why", ".status.autoscaler.lastReason", wide=True),
        PrinterColumn("Reason", '.status.conditions[?(@.type=="Available")].reason', wide=True),
    ),
)

POLICY_ROUTE = CrdKind(
    name="PolicyRoute",
    plural="policyroutes",
    short="polr",
    about="A policy that is served to users, by channels of checkpoints.",
    spec=PolicyRouteSpec,
    status=PolicyRouteStatus,
    rules=(NAME_RULE, unchanged("runRef")),
    columns=(
        PrinterColumn("Status", ".status.phase"),
        PrinterColumn("Stable", ".status.stable.version"),
        PrinterColumn("Since", ".status.stable.since", "date"),
        PrinterColumn("Canary", ".status.canary.version"),
        PrinterColumn("Share", ".status.test.share"),
        PrinterColumn("Candidate", ".status.candidate.number", "integer"),
        PrinterColumn("Policy", ".status.policy"),
        PrinterColumn("Decision", ".status.decision.action"),
        PrinterColumn("Age", ".metadata.creationTimestamp", "date"),
        PrinterColumn("Run", ".spec.runRef.name", wide=True),
        PrinterColumn("Checkpoint", ".status.stable.checkpoint", wide=True),
        PrinterColumn("Tested", ".status.canary.checkpoint", wide=True),
        PrinterColumn("Evaluation", ".status.candidate.evaluation", wide=True),
        PrinterColumn(
            "Proposed", '.status.conditions[?(@.type=="CandidateProposed")].reason', wide=True
        ),
        PrinterColumn("Experiment", ".status.test.experiment", wide=True),
        PrinterColumn("Gateways", ".status.gateways", wide=True),
        PrinterColumn("Engines", ".status.stable.engines", wide=True),
        PrinterColumn("Reason", '.status.conditions[?(@.type=="Available")].reason', wide=True),
        PrinterColumn("Why", ".status.decision.sentence", wide=True),
    ),
)

EVAL_RUN = CrdKind(
    name="EvalRun",
    plural="evalruns",
    short="evr",
    about="One policy on suites of tasks, compared with another EvalRun's result.",
    spec=EvalRunSpec,
    status=EvalRunStatus,
    selectable=(".spec.checkpointRef.name", ".status.phase"),
    rules=(
        NAME_RULE,
        RootRule(
            cel="self.spec == oldSelf.spec",
            message="spec is immutable, since a result is of one spec: make another EvalRun",
            field_path=".spec",
        ),
    ),
    columns=(
        PrinterColumn("Checkpoint", ".spec.checkpointRef.name"),
        PrinterColumn("Status", ".status.phase"),
        PrinterColumn("Suites", ".status.summary.suites"),
        PrinterColumn("Samples", ".spec.samples", "integer"),
        PrinterColumn("Mean", ".status.summary.mean"),
        PrinterColumn("Best", ".status.summary.bestOf"),
        PrinterColumn("Verdict", ".status.verdict"),
        PrinterColumn("Age", ".metadata.creationTimestamp", "date"),
        PrinterColumn("Baseline", ".spec.comparison.baselineRef.name", wide=True),
        PrinterColumn("Policy", ".status.policy", wide=True),
        PrinterColumn("Endpoint", ".spec.endpoint.model", wide=True),
        PrinterColumn("Lost", ".status.summary.lost", "integer", wide=True),
        PrinterColumn("Reason", '.status.conditions[?(@.type=="Complete")].reason', wide=True),
        PrinterColumn("Results", ".status.results.uri", wide=True),
    ),
)

KINDS = (RLRUN, CHECKPOINT, ENV_POOL, POLICY_ROUTE, EVAL_RUN)


def definition(kind: CrdKind) -> dict[str, Any]:
    """The CustomResourceDefinition of one kind."""
    names = {
        "kind": kind.name,
        "listKind": f"{kind.name}List",
        "plural": kind.plural,
        "singular": kind.name.lower(),
        "shortNames": [kind.short],
        "categories": ["etude"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": names,
            "scope": "Namespaced",
            "versions": [_version(kind)],
        },
    }


def _version(kind: CrdKind) -> dict[str, Any]:
    subresources: dict[str, Any] = {"status": {}}
    if kind.scales:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": subresources,
        "additionalPrinterColumns": [_column(column) for column in kind.columns],
        "schema": {"openAPIV3Schema": _root(kind)},
    }
    if kind.selectable:
        version["selectableFields"] = [{"jsonPath": path} for path in kind.selectable]
    return version


def _column(column: PrinterColumn) -> dict[str, Any]:
    shown = {"name": column.name, "type": column.type, "jsonPath": column.path}
    return shown | {"priority": 1} if column.wide else shown


def _root(kind: CrdKind) -> dict[str, Any]:
    root: dict[str, Any] = {
        "description": kind.about,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {
                "description": f"Version of this form of the object: {GROUP}/{VERSION}.",
                "type": "string",
            },
            "kind": {"description": f"{kind.name}.", "type": "string"},
            "metadata": {"type": "object"},
            "spec": schema(kind.spec),
            "status": schema(kind.status, defaults=False),
        },
    }
    if kind.rules:
        root[VALIDATIONS] = [
            {"rule": rule.cel, "message": rule.message}
            | ({"fieldPath": rule.field_path} if rule.field_path else {})
            | ({"messageExpression": rule.message_cel} if rule.message_cel else {})
            for rule in kind.rules
        ]
    return root


def text(kind: CrdKind) -> str:
    """The definition as the chart ships it."""
    return HEADER + yaml_documents.dump_documents([definition(kind)])


def main(arguments: Sequence[str]) -> None:
    """Write one file per kind into the folder named, or into the chart."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=CHART_FOLDER)
    folder: Path = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        (folder / f"{kind.plural}.yaml").write_text(text(kind), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
