"""Waves of groups whose tasks have an image each, with plans that name the next ones or without."""

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.trainer.controller.admission.plans import WAVES, PlanReporter
from etude.trainer.rollouts.tasks import Task
from images_bench.pool import SIBLINGS, ImagePool, run_group, running


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Shape of a run."""

    waves: int
    groups: int
    """Groups of a wave."""
    think_s: float
    """Time that a rollout takes after its first call."""
    step_s: float
    """Time of a step, between two waves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WavesResult:
    """Figures of one run."""

    is_planned: bool
    groups: int
    hits: int
    """Groups whose image was here when they were launched."""
    evictions: int
    ahead: int
    """Images that were pulled before a group asked for one."""
    median_s: float
    p90_s: float
    """Seconds to the first answer of a whole group."""
    total_s: float
    cpu_s: float

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.groups


async def run_waves(
    pool: ImagePool, images: Sequence[str], rhythm: Rhythm, *, is_planned: bool
) -> WavesResult:
    """Run groups of images drawn with a fixed seed; every image is as likely as any other."""
    draws = random.Random(7)  # noqa: S311 - a fixed order
    tasks = _write_tasks(pool.folder / "tasks", images)
    waves = [draws.sample(range(len(images)), rhythm.groups) for _ in range(rhythm.waves)]
    clock = asyncio.get_running_loop().time
    async with running(pool) as client:
        broker = f"127.0.0.1:{pool.ports['broker']}"
        planner = PlanReporter("bench", {"repos": broker}, {"repos": "t"})
        began_s, before_s, waited = clock(), pool.node_cpu_s(), list[float]()
        for number, wave in enumerate(waves):
            if is_planned:
                following = waves[number + 1 : number + 1 + WAVES]
                planner.report_wave(
                    [[tasks[n] for n in each] for each in following], siblings=SIBLINGS
                )
            groups = (run_group(client, images[n], think_s=rhythm.think_s) for n in wave)
            waited += await asyncio.gather(*groups)
            await asyncio.sleep(rhythm.step_s)
        await planner.close()
        requests = "etude_env_image_requests_total"
        return WavesResult(
            is_planned=is_planned,
            groups=len(waited),
            hits=len(waited) - round(pool.metric(requests, "miss")),
            evictions=round(pool.metric(requests, "eviction")),
            ahead=round(pool.metric(requests, "ahead")),
            median_s=statistics.median(waited),
            p90_s=statistics.quantiles(waited, n=10)[8],
            total_s=clock() - began_s,
            cpu_s=pool.node_cpu_s() - before_s,
        )


def _write_tasks(folder: Path, images: Sequence[str]) -> list[Task]:
    """Tasks as a controller finds them."""
    found = []
    for number, image in enumerate(images):
        place = folder / str(number)
        place.mkdir(parents=True)
        (place / "task.toml").write_text(f'[metadata]\netude_image = "{image}"\n')
        found.append(Task(task_id=f"t/{number}", uri=place.as_uri(), environment="repos"))
    return found
