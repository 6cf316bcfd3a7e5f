"""Progress of each phase."""

import statistics
from collections.abc import Iterator, Sequence

from etude.common.api.run.phases import Phase
from etude.trainer.controller.checkpoints.state import Cursor
from etude.v1 import run_pb2

FEWEST_STEPS = 3
"""Fewest steps from which the median is reported."""


def median_step_s(step_seconds: Sequence[float]) -> float:
    """Median time of the newest steps; 0 while there are too few."""
    return statistics.median(step_seconds) if len(step_seconds) >= FEWEST_STEPS else 0.0


def phase_progress(cursor: Cursor, phases: Sequence[Phase]) -> Iterator[run_pb2.PhaseProgress]:
    """Progress of the started phases, in order.

    Args:
        cursor: position of the run.
        phases: of its spec.
    """
    begun = [phase for phase in phases if phase.name in cursor.starts]
    if not begun:
        return
    ends = [cursor.starts[phase.name] for phase in begun[1:]] + [cursor.global_step]
    for phase, end in zip(begun, ends, strict=True):
        yield run_pb2.PhaseProgress(
            name=phase.name,
            step=end - cursor.starts[phase.name],
            target_step=phase.max_steps,
            is_done=phase.name in cursor.finished,
            gate=cursor.gates.get(phase.name, ""),
        )
