"""The kind EvalRun."""

from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override

from etude.common.api.evaluation.status import EvalRunStatus
from etude.common.api.kinds import EvalRun
from etude.common.api.schema import crd
from etude.operator.actions import Decision
from etude.operator.evaluations import decide, observe
from etude.operator.kind import KindContext, KindReconciler, PassInput, ResourceKind
from etude.operator.manifests import Manifest, Ref, ref


@dataclass(slots=True)
class EvaluationReconciler(KindReconciler[EvalRun, EvalRunStatus]):
    """Observes evaluations and decides."""

    context: KindContext

    @override
    def decide(
        self, resource: EvalRun, manifest: Manifest, inputs: PassInput
    ) -> Decision[EvalRunStatus]:
        observed = observe.observe_evaluation(self.context.cluster, resource, inputs.problem)
        return decide.decide(resource, observed, inputs.now, inputs.platform)


def _references(evaluation: Manifest) -> Iterator[Ref]:
    """The checkpoint, run, pools and baseline that an evaluation names."""
    namespace, spec = ref(evaluation).namespace, evaluation["spec"]
    named = [("Checkpoint", spec.get("checkpointRef")), ("RLRun", spec.get("runRef"))]
    named += [("EnvPool", each.get("poolRef")) for each in spec.get("environments") or ()]
    named.append(("EvalRun", (spec.get("comparison") or {}).get("baselineRef")))
    for kind, about in named:
        if about and about.get("name"):
            yield Ref(kind, namespace, about["name"])


EVAL_RUN = ResourceKind(
    definition=crd.EVAL_RUN,
    model=EvalRun,
    status=EvalRunStatus,
    reconciler=EvaluationReconciler,
    owner_of=observe.evaluation_of,
    references=_references,
)
