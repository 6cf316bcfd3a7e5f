"""The same children by the shortest handler that kopf's documentation teaches, to compare with.

Started by the bench in place of the operator. It makes what `desired` says a run has, one request
after the other, and says in the status that it did. It updates nothing, prunes nothing, adopts
whatever has the name and has no leader: the least that any operator does.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kopf
from tests.support.kube.api_client import connect_client

from etude.common.api.kinds import RLRun
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape, run_children
from operator_bench.manifests import NAMESPACE, THEIRS
from operator_bench.testbed import HOME

PLURALS = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Service": "/api/v1/namespaces/{}/services",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}
IMAGES = dict.fromkeys(("trainer", "inference", "rewards", "envserver", "operator"), "etude:1")


async def serve(known: Mapping[str, Any]) -> None:
    """Handle runs until ended."""
    async with connect_client(known, limit_s=None) as api:
        registry = kopf.OperatorRegistry()

        async def create(body: Any, patch: Any, **_: Any) -> None:  # noqa: ANN401 - kopf is untyped
            run = RLRun.model_validate(dict(body))
            children = run_children(run, RunShape(images=IMAGES), Platform(namespace=HOME))
            for child in children:
                await api.call("POST", PLURALS[child["kind"]].format(NAMESPACE), child)
            patch.status["observedGeneration"] = run.metadata.generation

        async def login(**_: Any) -> Any:  # noqa: ANN401 - as above
            return kopf.ConnectionInfo(
                server=f"https://{known['node_ip']}:6443",
                ca_path=f"{known['run']}/pki/ca.crt",
                certificate_path=f"{known['run']}/pki/admin.crt",
                private_key_path=f"{known['run']}/pki/admin.key",
            )

        def is_its_own(name: str, **_: Any) -> bool:  # noqa: ANN401 - as above
            return name.startswith(THEIRS)

        created = kopf.on.create(
            "etude.dev", "v1alpha1", "rlruns", registry=registry, when=is_its_own
        )
        created(create)
        kopf.on.login(registry=registry)(login)
        await kopf.operator(registry=registry, standalone=True, namespaces=[NAMESPACE])


if __name__ == "__main__":
    asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
