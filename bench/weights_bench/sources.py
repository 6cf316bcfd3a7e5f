"""Which trajectories are measured, at what size, and where they are kept."""

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from weights_bench import trajectory
from weights_bench.recipes import DemoPolicy, Reinforced, Synthetic
from weights_bench.trajectory import Trajectory

RATES = (1e-7, 1e-6, 3e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that the trajectories follow from."""

    synthetic: Synthetic
    reinforced: Reinforced
    demo: DemoPolicy | None
    """None: leave the demo's policy out."""


def full(pretraining_steps: int) -> Sources:
    """What the claims are about."""
    return Sources(
        synthetic=Synthetic(),
        reinforced=Reinforced(pretraining_steps=pretraining_steps),
        demo=DemoPolicy(),
    )


def tiny() -> Sources:
    """Seconds of work, to see that the bench itself is in order."""
    return Sources(
        synthetic=Synthetic(vocabulary=512, hidden=256, intermediate=512, key_value=128, layers=1),
        reinforced=Reinforced(
            width=128, layers=1, heads=2, inner=256, rows=2, pretraining_steps=2, steps=2
        ),
        demo=None,
    )


def claimed(sources: Sources, cache: Path) -> Iterator[Trajectory]:
    """A at its three learning rates, and B: what the ratios are means over, one in memory."""
    for path in _synthetic(sources, cache):
        yield trajectory.load(path)
    yield trajectory.load(_reinforced(sources, cache))


def middle(sources: Sources, cache: Path) -> Trajectory:
    """A at a learning rate of 1e-6, about 1.2 % changed: the one that pauses are measured on."""
    return trajectory.load(_synthetic(sources, cache)[RATES.index(1e-6)])


def others(sources: Sources, cache: Path, run: Path | None) -> Iterator[Trajectory]:
    """What is measured beside them: B as fp8, the demo's policy, a run's newest version."""
    from weights_bench.float8 import as_float8  # noqa: PLC0415 - takes torch, which takes seconds

    yield as_float8(trajectory.load(_reinforced(sources, cache)))
    for path in _demo(sources, cache):
        yield trajectory.load(path)
    if run is not None:
        from weights_bench.run_folder import newest_step  # noqa: PLC0415 - as above

        yield newest_step(run)


def _synthetic(sources: Sources, cache: Path) -> list[Path]:
    """One file per learning rate."""

    def make() -> Mapping[str, Trajectory]:
        from weights_bench import synthetic  # noqa: PLC0415 - as above

        return synthetic.trajectories(sources.synthetic, RATES, seed=0)

    files = trajectory.cached(cache, _key("A", sources.synthetic, RATES), make)
    return [files[f"A-{rate:.0e}"] for rate in RATES]


def _reinforced(sources: Sources, cache: Path) -> Path:
    def make() -> Mapping[str, Trajectory]:
        from weights_bench import reinforced  # noqa: PLC0415 - as above

        return {"B": reinforced.trajectory(sources.reinforced)}

    return trajectory.cached(cache, _key("B", sources.reinforced), make)["B"]


def _demo(sources: Sources, cache: Path) -> list[Path]:
    recipe = sources.demo
    if recipe is None:
        return []

    def make() -> Mapping[str, Trajectory]:
        from weights_bench import demo_policy  # noqa: PLC0415 - as above

        with tempfile.TemporaryDirectory() as scratch:
            return demo_policy.trajectories(recipe, Path(scratch))

    return list(trajectory.cached(cache, _key("C", recipe), make).values())


def _key(name: str, *facts: object) -> str:
    return f"{name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"
