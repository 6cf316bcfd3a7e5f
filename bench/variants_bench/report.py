"""Figures of the variants, over their seeds."""

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from tests.support.figures import Figure

from variants_bench.arms import ARMS, Arm, Step

Curves = Mapping[str, Sequence[Step]]
"""Steps by variant, of one seed."""
FIRST, LAST = 2, 5
"""Steps at the beginning and at the end that figures are means of."""


def summarise(seeds: Sequence[Curves]) -> dict[str, Figure]:
    """Figures of all variants, and the ratios."""
    found: dict[str, Figure] = {"seeds": len(seeds)}
    for arm in ARMS:
        key = _key(arm)
        for name in ("score", "success", "tokens", "contexts", "summary_tokens", "cut"):
            found[f"{key}_{name}_first"] = round(float(_first(seeds, arm, name).mean()), 4)
            found[f"{key}_{name}_last"] = round(float(_last(seeds, arm, name).mean()), 4)
        found[f"{key}_tokens_per_success"] = round(float(_per_success(seeds, arm).mean()), 1)
        found[f"{key}_success_by_seed"] = _texts(_last(seeds, arm, "success"))
        found[f"{key}_tokens_per_success_by_seed"] = _texts(_per_success(seeds, arm))
        for seed, curves in enumerate(seeds):
            found[f"{key}_curve_{seed}"] = _texts([each.score for each in curves[arm.name]])
    one, summaries, short = ARMS
    found["score_ratio_summaries"] = _ratio(seeds, "score", summaries, one)
    found["tokens_per_success_ratio_penalty"] = round(
        float(_per_success(seeds, short).mean() / _per_success(seeds, summaries).mean()), 3
    )
    found["success_ratio_penalty"] = _ratio(seeds, "success", short, summaries)
    return found


def show(seeds: Sequence[Curves], found: Mapping[str, Figure]) -> None:
    """Print the figures of all variants, and the curves."""
    names = ("score", "success", "tokens a rollout", "contexts", "cut", "tokens a success")
    table = Table("variant", *names)
    for arm in ARMS:
        key = _key(arm)
        cells = [
            f"{found[f'{key}_{name}_first']:.2f} to {found[f'{key}_{name}_last']:.2f}"
            for name in ("score", "success", "tokens", "contexts", "cut")
        ]
        table.add_row(arm.name, *cells, f"{found[f'{key}_tokens_per_success']:.0f}")
    steps = min(len(curves[arm.name]) for curves in seeds for arm in ARMS)
    shown = sorted({*range(0, steps, max(1, steps // 8)), steps - 1})
    curve = Table("score at step", *(str(step) for step in shown))
    for arm in ARMS:
        for seed, curves in enumerate(seeds):
            cells = [f"{curves[arm.name][step].score:.2f}" for step in shown]
            curve.add_row(f"{arm.name}, seed {seed}", *cells)
    console = Console(width=140)
    console.print(table)
    console.print(curve)
    console.print(
        f"Score with summaries over one context: {found['score_ratio_summaries']}. Tokens a success"
        f" with the penalty over without: {found['tokens_per_success_ratio_penalty']}, success"
        f" {found['success_ratio_penalty']}. {found['seconds']} s, {found['cpu_seconds']} CPU-s."
    )


def _key(arm: Arm) -> str:
    return arm.name.replace(" ", "_")


def _values(seeds: Sequence[Curves], arm: Arm, name: str, steps: slice) -> np.ndarray:
    """Means over steps, by seed."""
    return np.array(
        [np.mean([getattr(step, name) for step in curves[arm.name][steps]]) for curves in seeds]
    )


def _first(seeds: Sequence[Curves], arm: Arm, name: str) -> np.ndarray:
    return _values(seeds, arm, name, slice(FIRST))


def _last(seeds: Sequence[Curves], arm: Arm, name: str) -> np.ndarray:
    return _values(seeds, arm, name, slice(-LAST, None))


def _per_success(seeds: Sequence[Curves], arm: Arm) -> np.ndarray:
    """Tokens sampled in the last steps over their successes, by seed."""
    found: np.ndarray = _last(seeds, arm, "tokens") / np.maximum(_last(seeds, arm, "success"), 1e-3)
    return found


def _ratio(seeds: Sequence[Curves], name: str, one: Arm, other: Arm) -> float:
    ratio = _last(seeds, one, name).mean() / max(1e-3, float(_last(seeds, other, name).mean()))
    return round(float(ratio), 3)


def _texts(values: Sequence[float] | np.ndarray) -> list[str]:
    return [f"{value:.4g}" for value in values]
