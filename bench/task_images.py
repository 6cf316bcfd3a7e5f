"""Images of tasks on one node: hits, evictions, and the time to the first tool call.

python bench/task_images.py [--images 200] [--budget 40] [--waves 25] [--skip-vm]

Broker and node run as processes, as in production, with skopeo, umoci and mksquashfs. First the
ladder of one lease (cold, pulled, cached, forked), with gVisor and, on few images, with microVMs;
then waves of groups over all images with a disk budget for some, without plans and with plans that
name the images of the next waves. The peer of each ratio is the same node without what is measured.

Examples:
  make bench-images
  python bench/task_images.py --images 40 --budget 8 --waves 5 --skip-vm   a first look
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do

from images_bench import ladder, layouts, waves
from images_bench.ladder import Ladder
from images_bench.pool import MIB, SIBLINGS, ImagePool
from images_bench.waves import Rhythm, WavesResult
from tests.support import figures
from tests.support.vm import microvms

LADDER_IMAGES, VM_IMAGES = 8, 3


def main() -> None:
    """Measure, print, and write bench/out/images.json."""
    given = _arguments()
    console = Console(width=None if os.isatty(1) else 160)
    machine = microvms.small_image().folder
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        folder = Path(name)
        console.log(f"{given.images} images …")
        references = layouts.write_images(folder / "layout", given.images)
        first = _measure_ladder(console, folder, machine, "GVisor", references[:LADDER_IMAGES])
        budget_mib = max(256, round(given.budget * first.image_bytes / MIB))
        figures.record("images", images=given.images, budget=given.budget, budget_mib=budget_mib)
        rhythm = Rhythm(waves=given.waves, groups=8, think_s=given.think, step_s=given.step)
        runs = []
        for is_planned in (False, True):
            console.log(f"waves {'with' if is_planned else 'without'} plans …")
            pool = _pool(folder, f"waves-{is_planned}", machine, "GVisor")
            pool.disk_mib = budget_mib
            run = waves.run_waves(pool, references, rhythm, is_planned=is_planned)
            runs.append(asyncio.run(run))
            console.log(str(runs[-1]))
        _record_waves(*runs)
        ladders = [first]
        if not given.skip_vm:
            vms = references[:VM_IMAGES]
            ladders.append(_measure_ladder(console, folder, machine, "QemuMicroVM", vms))
    _show(console, ladders, runs)


def _measure_ladder(
    console: Console, folder: Path, machine: Path, driver: str, references: Sequence[str]
) -> Ladder:
    """Measure one driver, and record it at once: what follows takes long."""
    console.log(f"ladder of {driver} …")
    pool = _pool(folder, f"ladder-{driver}", machine, driver)
    found = asyncio.run(ladder.measure(pool, references))
    console.log(str(found))
    numbers: dict[str, int | float] = {
        "first_call_cold_s": round(found.cold_s, 3),
        "first_call_pulled_s": round(found.pulled_s, 3),
        "first_call_cached_s": round(found.cached_s, 3),
        "first_call_forked_s": round(found.forked_s, 3),
        "cold_cpu_s": round(found.cold_cpu_s, 3),
        "ladder_images": found.images,
    }
    prefix = "" if driver == "GVisor" else "vm_"
    figures.record("images", **{f"{prefix}{name}": number for name, number in numbers.items()})
    return found


def _pool(folder: Path, name: str, machine: Path, driver: str) -> ImagePool:
    place = folder / name
    place.mkdir()
    return ImagePool(
        folder=place,
        image=machine,
        slots=64,
        driver=driver,
        layout=folder / "layout",
        settings={"ETUDE_IMAGES": str(place / "images")},
    )


def _record_waves(without: WavesResult, planned: WavesResult) -> None:
    figures.record(
        "images",
        hit_ratio=round(planned.hit_ratio, 3),
        hit_ratio_without_plans=round(without.hit_ratio, 3),
        evictions=planned.evictions,
        evictions_without_plans=without.evictions,
        pulled_ahead=planned.ahead,
        groups=planned.groups,
        group_first_call_s=round(planned.median_s, 3),
        group_first_call_without_plans_s=round(without.median_s, 3),
        group_first_call_ratio=round(without.median_s / planned.median_s, 2),
        cpu_ratio=round(planned.cpu_s / without.cpu_s, 3),
    )


def _show(console: Console, ladders: Sequence[Ladder], runs: Sequence[WavesResult]) -> None:
    table = Table(title="seconds from launch to the first answer, medians")
    for column in ("driver", "images", "cold", "image here", "made of it", "forked", "cold/forked"):
        table.add_column(column)
    for each in ladders:
        seconds = (each.cold_s, each.pulled_s, each.cached_s, each.forked_s)
        ratio = f"{each.cold_s / each.forked_s:.1f} x"
        table.add_row(each.driver, str(each.images), *(f"{n:.2f}" for n in seconds), ratio)
    console.print(table)
    table = Table(title=f"waves of 8 groups of {SIBLINGS}, gVisor")
    columns = ("plans", "groups", "hits", "evictions", "ahead", "p50 s", "p90 s", "total s")
    for column in (*columns, "CPU-s"):
        table.add_column(column)
    for run in runs:
        table.add_row(
            "on" if run.is_planned else "off",
            str(run.groups),
            f"{run.hits} ({100 * run.hit_ratio:.0f} %)",
            str(run.evictions),
            str(run.ahead),
            *(f"{n:.2f}" for n in (run.median_s, run.p90_s, run.total_s, run.cpu_s)),
        )
    console.print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--budget", type=int, default=40, help="images that fit on the disk")
    parser.add_argument("--waves", type=int, default=25)
    parser.add_argument("--think", type=float, default=3.0, help="seconds of a rollout")
    parser.add_argument("--step", type=float, default=5.0, help="seconds between two waves")
    parser.add_argument("--skip-vm", action="store_true", help="without microVMs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
