"""Leader lease: the Lease object of leader election."""

import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from typing_extensions import override

from etude.operator.clock import rfc3339_micro
from etude.operator.kube.interface import ClusterError, ConflictError
from etude.operator.kube.rest import RestClient, object_path, parse_read_reply, path_of
from etude.operator.manifests import Manifest, Ref

DURATION_S = 10


class LeaderLease(NamedTuple):
    """The leader, and the version of the record that names it."""

    holder: str
    duration_s: int = DURATION_S
    transitions: int = 0
    version: str = ""
    """Empty for a record that is not written yet."""


class LeaseStore(Protocol):
    """Storage of the one record."""

    async def read(self) -> LeaderLease | None: ...
    async def write(self, record: LeaderLease) -> LeaderLease:
        """Write the record over the version in it.

        Raises:
            ConflictError: another process wrote in between.
        """
        ...


@dataclass(slots=True)
class MemoryLeaseStore(LeaseStore):
    """The record in memory, for tests."""

    record: LeaderLease | None = None
    is_down: bool = False
    _version: int = 0

    @override
    async def read(self) -> LeaderLease | None:
        if self.is_down:
            raise ClusterError("the API server does not answer")
        return self.record

    @override
    async def write(self, record: LeaderLease) -> LeaderLease:
        if self.is_down:
            raise ClusterError("the API server does not answer")
        if record.version != (self.record.version if self.record else ""):
            raise ConflictError("another process wrote the lease")
        self._version += 1
        self.record = record._replace(version=str(self._version))
        return self.record


@dataclass(slots=True)
class KubernetesLeaseStore(LeaseStore):
    """One Lease of one namespace."""

    rest: RestClient
    namespace: str
    name: str

    @override
    async def read(self) -> LeaderLease | None:
        reply = await self.rest.request("GET", object_path(self._ref()), is_urgent=True)
        if reply.status == 404:
            return None
        manifest = parse_read_reply(reply, "read lease")
        spec = manifest.get("spec") or {}  # optional in the schema
        return LeaderLease(
            holder=spec.get("holderIdentity") or "",
            duration_s=spec.get("leaseDurationSeconds") or 0,
            transitions=spec.get("leaseTransitions") or 0,
            version=manifest["metadata"]["resourceVersion"],
        )

    @override
    async def write(self, record: LeaderLease) -> LeaderLease:
        if record.version:
            verb, path = "PUT", object_path(self._ref())
        else:
            verb, path = "POST", path_of("Lease", self.namespace)
        body = self._manifest(record)
        reply = await self.rest.request(verb, path, body=body, is_urgent=True)
        written = parse_read_reply(reply, "write lease")
        return record._replace(version=written["metadata"]["resourceVersion"])

    def _ref(self) -> Ref:
        return Ref("Lease", self.namespace, self.name)

    def _manifest(self, record: LeaderLease) -> Manifest:
        # Only for people: no candidate decides by it, because clocks differ.
        metadata = {"name": self.name, "namespace": self.namespace}
        if record.version:
            metadata["resourceVersion"] = record.version
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": record.duration_s,
            "leaseTransitions": record.transitions,
            "renewTime": rfc3339_micro(time.time()),
        }
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
