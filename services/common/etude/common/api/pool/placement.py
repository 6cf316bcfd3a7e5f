"""Placement of a pool's hosts on nodes."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common.api.meta import QUALIFIED, SUBDOMAIN, LabelValue, Model, Rule

KEY = rf"^(({SUBDOMAIN}/)?{QUALIFIED})?$"


class Toleration(Model):
    """A taint that does not keep hosts away, as Kubernetes writes it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.operator == 'Equal' ? has(self.key) && self.key != '' : !has(self.value)",
            holds=lambda s: bool(s.key) if s.operator == "Equal" else s.value is None,
            message="operator Equal needs a key, and operator Exists takes no value",
            fix="write {key: KEY, value: VALUE}, or {key: KEY, operator: Exists}",
        ),
    )

    key: Annotated[str, Field(max_length=317, pattern=KEY)] | None = None
    """The taint's key; every key unless set."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Exists takes every value."""
    value: LabelValue | None = None
    """The taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; every effect unless set."""


class Placement(Model):
    """Placement of a pool's hosts on nodes."""

    node_selector: dict[str, LabelValue] = Field(default_factory=dict, max_length=64)
    """Labels that a node must carry."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] = ()
    """Taints that do not keep hosts away."""
    one_per_machine: bool = False
    """Hosts of this pool never share a node, as those of a DaemonSet: a replica for which there is
    no node waits for one."""
