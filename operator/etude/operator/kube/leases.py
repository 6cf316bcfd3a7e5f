"""Leader lease: the Lease object of leader election."""

from dataclasses import dataclass
from datetime import UTC, datetime

from typing_extensions import override

from etude.operator.controller.leader_election import LeaseRecord, Leases
from etude.operator.kube.rest import Rest, answered, object_path, path_of
from etude.operator.manifests import Manifest, Ref


@dataclass(slots=True)
class KubernetesLeases(Leases):
    """One Lease of one namespace."""

    rest: Rest
    namespace: str
    name: str

    @override
    async def read(self) -> LeaseRecord | None:
        reply = await self.rest.request("GET", object_path(self._ref()), is_urgent=True)
        if reply.status == 404:
            return None
        manifest = answered(reply, "read lease")
        spec = manifest.get("spec") or {}  # optional in the schema
        return LeaseRecord(
            holder=spec.get("holderIdentity") or "",
            duration_s=spec.get("leaseDurationSeconds") or 0,
            transitions=spec.get("leaseTransitions") or 0,
            version=manifest["metadata"]["resourceVersion"],
        )

    @override
    async def write(self, record: LeaseRecord) -> LeaseRecord:
        if record.version:
            verb, path = "PUT", object_path(self._ref())
        else:
            verb, path = "POST", path_of("Lease", self.namespace)
        body = self._manifest(record)
        reply = await self.rest.request(verb, path, body=body, is_urgent=True)
        written = answered(reply, "write lease")
        return record._replace(version=written["metadata"]["resourceVersion"])

    def _ref(self) -> Ref:
        return Ref("Lease", self.namespace, self.name)

    def _manifest(self, record: LeaseRecord) -> Manifest:
        # Only for people: no candidate decides by it, because clocks differ.
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        metadata = {"name": self.name, "namespace": self.namespace}
        if record.version:
            metadata["resourceVersion"] = record.version
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": record.duration_s,
            "leaseTransitions": record.transitions,
            "renewTime": now,
        }
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
