"""Egress rules of a driver's sandboxes: changes of a pool's network reach those that run."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from etude.common.api.pool.network import Network

RuleNames = Mapping[str, Sequence[str] | None]
"""Names of the egress rules that each template may use; None is all."""


class NetworkUpdates(Protocol):
    """Takes newer egress rules; a driver without egress has nothing to do."""

    def replace_network(self, network: Network, rules: RuleNames) -> int:
        """Apply newer egress rules to running sandboxes; returns how many connections were cut."""
        return 0
