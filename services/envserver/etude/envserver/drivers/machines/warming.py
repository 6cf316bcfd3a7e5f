"""Readiness of templates and targets of their warm pools; templates share a pool by image."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import quantiles

from etude.envserver.drivers.base import Warmth
from etude.envserver.drivers.machines.levels import FEWEST, MOST, Target
from etude.envserver.drivers.machines.pace import Work
from etude.envserver.drivers.machines.starts import Starter


def warmth(template: str, starter: Starter, quarantined: str) -> Warmth:
    """Report the readiness of a template."""
    held, median_ms, slow_ms = starter.stock.held, 0.0, 0.0
    if len(starter.recent_ms) > 1:
        tenths = quantiles(starter.recent_ms, n=10)
        median_ms, slow_ms = tenths[4], tenths[8]
    return Warmth(
        template=template,
        paused_clones=held.paused,
        shells=held.shells,
        spawn_cpu_ms=starter.lanes.costs.of(Work.RESTORE),
        start_p50_ms=median_ms,
        start_p90_ms=slow_ms,
        quarantined=quarantined,
    )


def targets(
    starter_of: Callable[[str], Starter],
    templates: Iterable[str],
    wanted: Sequence[Warmth],
    max_shells: int,
) -> Iterator[tuple[Starter, Target]]:
    """Compute the target of each warm pool: the sum over its templates."""
    by_name = {each.template: each for each in wanted}
    sums: dict[int, tuple[Starter, int, int]] = {}
    for name in templates:
        starter = starter_of(name)
        each = by_name.get(name, Warmth(template=name))
        _, paused, shells = sums.get(id(starter), (starter, 0, 0))
        sums[id(starter)] = (starter, paused + each.paused_clones, shells + each.shells)
    for starter, paused, shells in sums.values():
        kept = min(shells, MOST)
        # A template that was rolled back once is again, and an idle VMM saves a third of that.
        yield (
            starter,
            Target(paused=paused, shells=kept, max_shells=max(kept, min(max_shells, FEWEST))),
        )
