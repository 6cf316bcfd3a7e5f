"""Costs of starting an environment on a host, by what the host has ready."""

from dataclasses import dataclass
from typing import NamedTuple, Self

from etude.v1 import environments_pb2

CLONE_CPU_MS, SHELL_CPU_MS, SPAWN_CPU_MS, BOOT_CPU_MS = 2.0, 25.0, 45.0, 2_400.0
"""Measured on QEMU without KVM; a host's own figures replace them."""
CLONE_MS, SHELL_MS, SPAWN_MS, BOOT_MS = 1.2, 25.0, 48.0, 2_400.0
"""Wall time of the same starts, on an idle host."""


class StartCost(NamedTuple):
    """One start."""

    cpu_ms: float
    ready_ms: float
    """From order to ready, when nothing else waits."""


@dataclass(slots=True, kw_only=True)
class TemplateReadiness:
    """Readiness of a host for a template, less the starts ordered since its report."""

    paused_clones: int = 0
    shells: int = 0
    resident: bool = True
    spawn_cpu_ms: float = SPAWN_CPU_MS
    spawn_ms: float = SPAWN_MS
    slow_ms: float = SPAWN_MS
    """90th percentile of the start time."""
    quarantined: str = ""

    @classmethod
    def from_message(cls, told: environments_pb2.TemplateLevel) -> Self:
        spawn_ms = float(told.start_p50_ms) or SPAWN_MS
        return cls(
            paused_clones=told.paused_clones,
            shells=told.shells,
            resident=told.resident,
            spawn_cpu_ms=float(told.spawn_cpu_ms) or SPAWN_CPU_MS,
            spawn_ms=spawn_ms,
            slow_ms=max(spawn_ms, float(told.start_p90_ms)),
            quarantined=told.quarantined,
        )

    @property
    def cost(self) -> StartCost:
        if self.paused_clones:
            return StartCost(min(CLONE_CPU_MS, self.spawn_cpu_ms), min(CLONE_MS, self.spawn_ms))
        if self.shells:
            share = SHELL_CPU_MS / SPAWN_CPU_MS
            return StartCost(share * self.spawn_cpu_ms, min(SHELL_MS, self.spawn_ms))
        if self.resident:
            return StartCost(self.spawn_cpu_ms, self.spawn_ms)
        return StartCost(max(BOOT_CPU_MS, self.spawn_cpu_ms), max(BOOT_MS, self.spawn_ms))

    def count_start(self) -> None:
        """Deduct one ordered start."""
        if self.paused_clones:
            self.paused_clones -= 1
        elif self.shells:
            self.shells -= 1
        else:
            self.resident = True


UNREPORTED = TemplateReadiness()
"""A template that a host does not report: it starts without anything prepared."""
