"""Backends of a pool: pods, or Sandboxes of agent-sandbox."""

from enum import StrEnum

from etude.common.api.meta import Rule


class Backend(StrEnum):
    """Kind of object for one host: a pod, or a Sandbox of the project agent-sandbox."""

    PODS = "Pods"
    AGENT_SANDBOX = "AgentSandbox"


_SANDBOX = "self.backend == 'AgentSandbox'"

BACKENDS: tuple[Rule, ...] = (
    Rule(
        cel=f"({_SANDBOX}) == has(self.sandboxTemplateRef)",
        holds=lambda s: (
            (s.backend is Backend.AGENT_SANDBOX) == (s.sandbox_template_ref is not None)
        ),
        message="backend AgentSandbox needs sandboxTemplateRef, and no other one reads it",
        fix="set sandboxTemplateRef to {name: SANDBOXTEMPLATE}, or remove it",
        field_path=".sandboxTemplateRef",
    ),
    Rule(
        cel=f"!({_SANDBOX}) || self.slotsPerReplica == 1",
        holds=lambda s: s.backend is not Backend.AGENT_SANDBOX or s.slots_per_replica == 1,
        message="slotsPerReplica must be 1 with backend AgentSandbox: a Sandbox is the wall around"
        " one environment",
        fix="set slotsPerReplica to 1",
        field_path=".slotsPerReplica",
    ),
    Rule(
        cel=f"!({_SANDBOX}) || (has(self.isolation) && has(self.isolation.driver)"
        " && self.isolation.driver == 'Process')",
        holds=lambda s: s.backend is not Backend.AGENT_SANDBOX or s.isolation.driver == "Process",
        message="isolation.driver must be Process with backend AgentSandbox: a Sandbox runs no"
        " machines and no containers of its own",
        fix="set isolation to {minimum: Process, driver: Process}: what the RuntimeClass of the"
        " SandboxTemplate adds is not counted",
        field_path=".isolation.driver",
    ),
)
