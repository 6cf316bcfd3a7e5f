"""Sandbox objects of agent-sandbox: a pool's hosts for backend AgentSandbox.

API: https://github.com/kubernetes-sigs/agent-sandbox, agents.x-k8s.io/v1beta1, release v1.0.7.
"""

from collections.abc import Mapping

from etude.common.api.kinds import EnvPool
from etude.operator.builders.pod import RolePod, pod_spec
from etude.operator.builders.strategic_merge import strategic_merge
from etude.operator.builders.workload import object_head
from etude.operator.manifests import RESOURCES, Manifest


def sandbox(
    pool: EnvPool, name: str, labels: Mapping[str, str], pod: RolePod, template: Manifest
) -> Manifest:
    """A host's pod as a Sandbox, with the platform's template merged over it.

    Args:
        pool: of the host.
        name: of the Sandbox and of its pod.
        labels: of both.
        pod: of the host, without the template.
        template: the SandboxTemplate.
    """
    blueprint = template.get("spec", {})
    over = blueprint.get("podTemplate", {})
    metadata = over.get("metadata", {})
    pod_template: Manifest = {
        "metadata": {"labels": {**metadata.get("labels", {}), **labels}},
        "spec": strategic_merge(pod_spec(pod), over.get("spec", {})),
    }
    if metadata.get("annotations"):
        pod_template["metadata"]["annotations"] = metadata["annotations"]
    spec: Manifest = {"podTemplate": pod_template}
    if blueprint.get("volumeClaimTemplates"):
        spec["volumeClaimTemplates"] = blueprint["volumeClaimTemplates"]
    api_version = RESOURCES["Sandbox"].api_version
    return {**object_head(pool, api_version, "Sandbox", name, labels), "spec": spec}
