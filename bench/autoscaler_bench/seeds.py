"""Ours against Knative's over several seeds: what one seed says may be its own luck."""

from statistics import median
from typing import NamedTuple

from autoscaler_bench.simulation import Mode, Simulation
from autoscaler_bench.traces import traces


class Ratios(NamedTuple):
    """What mode Predictive costs, over what Knative's autoscaler does."""

    seed: int
    idle: float
    """GPU-seconds that waited."""
    sandbox: float
    """Replica-seconds."""


def ratios(waves: int, seed: int) -> Ratios:
    """Those of all traces of one seed together."""
    ours, theirs = (
        [Simulation(trace, mode).outcome() for trace in traces(waves, seed)]
        for mode in (Mode.PLAN, Mode.KPA)
    )
    return Ratios(
        seed,
        sum(each.idle_s for each in ours) / sum(each.idle_s for each in theirs),
        sum(each.sandbox_s for each in ours) / sum(each.sandbox_s for each in theirs),
    )


def sentence(found: list[Ratios]) -> str:
    """Every seed, and the medians."""
    each = ", ".join(f"{r.seed}: {r.idle:.3f} at {r.sandbox:.3f}" for r in found)
    idle, sandbox = (median(getattr(r, name) for r in found) for name in ("idle", "sandbox"))
    return f"by seed {each}; median {idle:.3f} at {sandbox:.3f}"
