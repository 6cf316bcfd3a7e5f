"""Learning-rate schedules: warm-up, constant, linear, cosine, warm-up-stable-decay."""

import math

from etude.common.api.meta import number
from etude.common.api.run.phases import Optimizer


def learning_rate(step: int, *, optimizer: Optimizer, max_steps: int) -> float:
    """Learning rate of a step, counted from 0; steps past the end use the last step's rate.

    Warm-up rises linearly and reaches the peak at step warmup_steps - 1. The decay reaches
    final_fraction of the peak at the last step.
    """
    peak = number(optimizer.learning_rate)
    warmup = optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    start = _decay_start(optimizer, max_steps)
    final = number(optimizer.final_fraction)
    progress = min(1.0, max(0.0, (step - start) / max(1, max_steps - 1 - start)))
    match optimizer.schedule:
        case "Constant":
            return peak
        case "Linear" | "WarmupStableDecay":
            return peak * (1 - (1 - final) * progress)
        case "Cosine":
            return peak * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)


def _decay_start(optimizer: Optimizer, max_steps: int) -> int:
    """Last step that still has the peak rate."""
    warm = max(0, optimizer.warmup_steps - 1)
    if optimizer.schedule != "WarmupStableDecay":
        return warm
    return max(warm, int(number(optimizer.decay_start) * max_steps))
