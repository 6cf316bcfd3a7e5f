"""What runs do to a pool: how many environments, of which template, when and for how long.

All is drawn beforehand from a seed, so that every mode meets the same work: leases and training
steps last as long; only when they begin depends on how long environments are waited for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

RARE_S, RARE_EVERY = 180.0, 10
"""An evaluation and a checkpoint: so much longer is every so manieth gap."""


class Ask(NamedTuple):
    """One environment."""

    template: str
    held_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioning:
    """How long replicas take to be ready, and how often they never are."""

    median_s: float = 20.0
    spread: float = 0.35
    """Sigma of the logarithm."""
    failing: float = 0.0
    """Share of replicas that fail after that time."""
    going_s: float = 10.0
    """From being given up to being gone."""

    slow: float = 0.02
    """Share of replicas that wait for a machine with a cold cache, four times as long."""
    slowest: float = math.inf
    """No replica takes longer than so many times the median."""

    def drawn(self, random: Random) -> tuple[float, bool]:
        """One replica's time in seconds, and whether it fails then."""
        factor = (4.0 if random.random() < self.slow else 1.0) * random.lognormvariate(
            0.0, self.spread
        )
        return self.median_s * min(factor, self.slowest), random.random() < self.failing


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One run's work."""

    name: str
    waves: tuple[tuple[Ask, ...], ...]
    """Groups that start together."""
    training_s: tuple[float, ...]
    """Of the step after each wave."""
    gpus: int
    """That wait while environments are waited for."""
    in_flight: int = 1
    """Waves that are under way at once; one is a synchronous run."""
    slots: int = 1
    """Environments of a replica."""
    max_replicas: int = 1000
    provisioning: Provisioning = Provisioning()
    seed: int


Held = Callable[[Random], float]


def lognormal(median_s: float, spread: float, limit_s: float) -> Held:
    """Rollouts that end at a time limit."""
    return lambda random: min(limit_s, median_s * random.lognormvariate(0.0, spread))


def pareto(least_s: float, shape: float, limit_s: float) -> Held:
    """The same, with a heavier tail."""
    return lambda random: min(limit_s, least_s * random.paretovariate(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a trace is drawn."""

    waves: int
    groups: int
    siblings: int
    held: Held
    training_s: float
    templates: tuple[str, ...] = ("python",)

    def drawn(self, random: Random) -> tuple[tuple[tuple[Ask, ...], ...], tuple[float, ...]]:
        """Waves and training steps."""
        waves = tuple(
            tuple(
                Ask(template, self.held(random))
                for template in random.choices(self.templates, k=self.groups)
                for _ in range(self.siblings)
            )
            for _ in range(self.waves)
        )
        steps = tuple(
            self.training_s * random.lognormvariate(0.0, 0.1)
            + (RARE_S if number % RARE_EVERY == RARE_EVERY - 1 else 0.0)
            for number in range(self.waves)
        )
        return waves, steps


def traces(waves: int, seed: int) -> list[Trace]:
    """The traces of the benchmark, of so many waves each."""
    shapes: list[tuple[str, Shape, dict[str, object]]] = [
        (
            "lognormal",
            Shape(waves=waves, groups=32, siblings=8, held=lognormal(90, 0.7, 600), training_s=90),
            {"gpus": 16},
        ),
        (
            "pareto",
            Shape(waves=waves, groups=16, siblings=8, held=pareto(40, 1.5, 900), training_s=120),
            {"gpus": 8},
        ),
        (
            "asynchronous",
            Shape(
                waves=2 * waves, groups=8, siblings=8, held=lognormal(120, 0.8, 900), training_s=60
            ),
            {"gpus": 8, "in_flight": 3},
        ),
        (
            "four templates",
            Shape(
                waves=waves,
                groups=24,
                siblings=8,
                held=lognormal(60, 1.0, 600),
                training_s=150,
                templates=("python", "rust", "go", "java"),
            ),
            {"gpus": 16},
        ),
        (
            "failures",
            Shape(waves=waves, groups=16, siblings=8, held=lognormal(90, 0.7, 600), training_s=120),
            {"gpus": 8, "provisioning": Provisioning(median_s=30.0, spread=0.5, failing=0.15)},
        ),
        (
            "nodes of 16",
            Shape(waves=waves, groups=64, siblings=8, held=pareto(60, 1.8, 900), training_s=120),
            {"gpus": 32, "slots": 16, "provisioning": Provisioning(median_s=60.0)},
        ),
    ]
    found = []
    for number, (name, shape, more) in enumerate(shapes):
        drawn, steps = shape.drawn(Random(f"{seed}/{name}"))  # noqa: S311 - a draw, no secret
        found.append(
            Trace(name=name, waves=drawn, training_s=steps, seed=seed * 100 + number, **more)  # type: ignore[arg-type]
        )
    return found
