"""How long ranks may take before they are taken to hang: longer for a model that is larger."""

from dataclasses import dataclass

PAUSE_S = 5.0
"""Shortest limit: a swap in place takes milliseconds."""

BESIDE_S = 120.0
"""Shortest limit for what goes on beside forward passes, and holds nobody up."""

BESIDE_BYTES_PER_S = 10 << 20
"""Slowest rate at which a version is prepared; one busy core does twenty times of it."""

SLACK = 4.0
"""Writing a version is less work than preparing it was; a machine may be this much busier."""


@dataclass(slots=True)
class Pace:
    """What ranks took for work that grows with the model, as a swap does."""

    bake_s: float = 0.0
    """To map the model, and to scan it as a whole."""
    loads: bool = False
    """Whether what is written goes through the model's loader, as it did when it was mapped."""
    _last_s: float = 0.0
    _longest_s: float = 0.0

    def prepared(self, took_s: float) -> None:
        """Remember how long preparing a version took."""
        self._last_s = took_s
        self._longest_s = max(self._longest_s, took_s)

    def prepare_limit_s(self, num_bytes: int) -> float:
        """For preparing a version of this size, beside forward passes."""
        loading_s = self.bake_s if self.loads else 0.0
        return BESIDE_S + num_bytes / BESIDE_BYTES_PER_S + SLACK * loading_s

    @property
    def scan_limit_s(self) -> float:
        """For a scan of the whole model beside forward passes."""
        return BESIDE_S + SLACK * SLACK * self.bake_s

    @property
    def write_limit_s(self) -> float:
        """For writing the version that was prepared last."""
        return max(PAUSE_S, SLACK * (self._last_s + (self.bake_s if self.loads else 0.0)))

    @property
    def undo_limit_s(self) -> float:
        """For taking any version back, or for a scan of the whole model."""
        return max(PAUSE_S, SLACK * (self._longest_s + self.bake_s))
