"""Definition of a signal, and the figures of a whole window that its values depend on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.feedback.signals.censoring import CensoringCurve
from etude.feedback.signals.history import RolloutHistory
from etude.feedback.signals.outcome import SignalState, SignalValue

FOLLOWUP_S = 1_800.0
"""A message later than this after a turn is a new thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalContext:
    """Horizon of the signals, and figures of all rollouts that are measured together."""

    horizon_s: float
    """Age at which edits and outcomes count."""
    now_ms: int
    censoring: CensoringCurve = field(default_factory=CensoringCurve)
    """Of the edits."""
    usual_wall_s: Mapping[str, float] = field(default_factory=dict)
    """Median seconds of a turn, by the hash of its configuration."""
    editing: frozenset[str] = frozenset()
    """Hashes of the configurations in which a policy edits files."""

    def state(self, history: RolloutHistory, *, delay_s: float) -> SignalState:
        """State of a signal that later events may change until a delay after the last turn."""
        is_over = self.now_ms >= history.last_ms + 1_000 * delay_s
        return SignalState.FINAL if is_over else SignalState.WAITING


class Signal(NamedTuple):
    """One entry of the registry."""

    name: str
    version: int
    """Raised with every change of its values."""
    weight: float
    """In the reward, by default; negative where more is worse."""
    measure: Callable[[RolloutHistory, SignalContext], SignalValue]
    """Pure, with a bounded ratio: values without bounds would let few users flatten the others'."""
