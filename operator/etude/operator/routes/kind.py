"""The kind PolicyRoute."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from typing_extensions import override

from etude.common.api.kinds import PolicyRoute
from etude.common.api.route.status import PolicyRouteStatus
from etude.common.api.schema import crd
from etude.operator import names
from etude.operator.actions import Decision
from etude.operator.kind import KindContext, KindReconciler, PassInput, ResourceKind
from etude.operator.manifests import Manifest, Ref, labels, ref
from etude.operator.metrics import ConditionMetric
from etude.operator.remotes.followers import ReportSource
from etude.operator.routes import decide


@dataclass(slots=True)
class RouteReconciler(KindReconciler[PolicyRoute, PolicyRouteStatus]):
    """Observes routes and decides."""

    context: KindContext
    _conditions: ConditionMetric = field(default_factory=ConditionMetric)

    @override
    def decide(
        self, resource: PolicyRoute, manifest: Manifest, inputs: PassInput
    ) -> Decision[PolicyRouteStatus]:
        context = self.context
        observed = decide.observe_route(
            context.cluster, context.reports, resource, inputs.problem, inputs.platform
        )
        context.followers.follow_ready_pod(
            ref(manifest),
            ReportSource(resource.metadata.uid),
            observed.releases.target or "",
            observed.pods.get(names.FEEDBACK, ()),
        )
        self._conditions.export(ref(manifest), resource.status.conditions)
        return decide.decide(resource, observed, inputs.now, inputs.platform)

    @override
    def forget(self, key: Ref, uid: str) -> None:
        self._conditions.remove(key)


def _references(route: Manifest) -> Iterator[Ref]:
    """The run that a route serves."""
    run = (route["spec"].get("runRef") or {}).get("name")
    if run:
        yield Ref("RLRun", ref(route).namespace, run)


POLICY_ROUTE = ResourceKind(
    definition=crd.POLICY_ROUTE,
    model=PolicyRoute,
    status=PolicyRouteStatus,
    reconciler=RouteReconciler,
    owner_of=lambda child: labels(child).get(names.ROUTE),
    references=_references,
)
