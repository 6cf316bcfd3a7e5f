"""Environments against their goals: one table, each figure beside its goal, CPU time beside wall.

python bench/env.py [--only starts,burst] [--spec SPEC] [--scale 0.1]

On a busy machine wall time tells of the neighbours; CPU time is the figure to watch.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from environment_bench import burst, density, forks, goals, handout, readoption, reads, starts
from rich.console import Console

from etude.common.run_folder.state import images_folder
from etude.demo import image as demo_image
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.builder import build
from etude.envserver.images.command import find_agent
from etude.envserver.images.spec import read_spec


class Measure(Protocol):
    """One kind of measurement, on an image, in an empty folder."""

    async def __call__(self, folder: Path, image: Path, *, count: int) -> list[goals.Figure]: ...


MEASURES: Mapping[str, tuple[int, Measure]] = {
    "starts": (200, starts.measure),
    "reads": (50, reads.measure),
    "machines": (1_000, handout.measure),
    "forks": (100, forks.measure),
    "readoption": (100, readoption.measure),
    "burst": (1_000, burst.measure),
    "density": (1_000, density.measure),
}
"""How often, and what."""


def main() -> None:
    """Measure, print, and write bench/out/env.json."""
    given = _arguments()
    console = Console(width=150)
    spec = read_spec(given.spec) if given.spec else demo_image.spec()
    agent = find_agent(None, {}, Path.home())
    image = build(spec, agent=agent, cache=BuildCache(images_folder()), say=console.log)
    figures: list[goals.Figure] = []
    for name in given.only.split(","):
        count, measure = MEASURES[name]
        scaled = max(4, round(count * given.scale))
        console.log(f"{name}: {scaled} …")
        with tempfile.TemporaryDirectory(prefix="etude-bench-") as folder:
            figures += asyncio.run(_measured(measure, Path(folder), image.folder, scaled))
    goals.show(figures, console)
    if given.scale == 1:
        goals.merge(figures)


async def _measured(measure: Measure, folder: Path, image: Path, count: int) -> list[goals.Figure]:
    return await measure(folder, image, count=count)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/env.py", description=__doc__)
    parser.add_argument("--only", default=",".join(MEASURES), help="some of them, by comma")
    parser.add_argument("--spec", type=Path, help="another image than the demo's")
    parser.add_argument("--scale", type=float, default=1.0, help="fewer repetitions: nothing kept")
    given = parser.parse_args()
    if unknown := set(given.only.split(",")) - MEASURES.keys():
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(MEASURES)}")
    return given


if __name__ == "__main__":
    main()
