"""Variants of a demo: summaries where tasks do not fit a context, and a length penalty.

python bench/demo_variants.py [--seeds 3] [--steps 30] [--warm-up 1200]

Each task has ten files that are longer than a context, a colour in the first and an animal in the
last. A small model imitates demonstrators who talk too much, and whose summaries mostly leave out
what they found. From there reinforcement learning trains three variants on the same tasks, each on
several seeds: one context, as the peer; summaries; and summaries with a length penalty. Engine,
its updates, turn loop, summaries, learner and penalty are those of a run; files are in memory, and
there is no controller between them.

Examples:
  make bench-demo-variants
  python bench/demo_variants.py --seeds 1 --steps 4   a first look
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do
# Threads that spin while they wait take several times the CPU on busy cores; torch reads it once.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from tests.support import figures
from variants_bench import report
from variants_bench.arms import ARMS, Recipe, Reinforcement, Step

TRACES = 1_200
AT_ONCE = 2
"""Seeds at a time, each on a thread."""
LIMIT_S = 3_600


def main() -> None:
    """Warm up, train all variants, print, and write bench/out/demo_variants.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of each variant")
    parser.add_argument("--warm-up", type=int, default=1_200, help="steps of imitation")
    parser.add_argument("--model", type=Path, help="a warmed-up model, of an earlier run")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.seed is not None:
        _train_seed(given.model, given.seed, given.steps)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="etude-variants-") as name:
        model = given.model or _warm_up(Path(name), steps=given.warm_up)
        train = partial(_start_seed, model, steps=given.steps)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            seeds = list(pool.map(train, range(given.seeds)))
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time()
    found = report.summarise(seeds)
    found["seconds"] = round(time.monotonic() - started, 1)
    found["cpu_seconds"] = round(usage.ru_utime + usage.ru_stime + own, 1)
    report.show(seeds, found)
    figures.record("demo_variants", **found)


def _warm_up(folder: Path, *, steps: int) -> Path:
    from variants_bench import warm_up  # noqa: PLC0415 - seeds do without it

    warm_up.write_model(folder / "model")
    store = folder / "store"
    done = warm_up.warm_up(folder / "model", store, traces=TRACES, steps=steps, seed=0)
    print(
        f"warm-up: {steps} steps on {done['contexts']:.0f} contexts, loss {done['loss']:.3f},"
        f" {done['seconds']:.0f} s",
        flush=True,
    )
    return store / warm_up.EXPORT


def _start_seed(model: Path, seed: int, *, steps: int) -> report.Curves:
    """Train all variants of a seed in a process of its own."""
    arguments = ["--model", str(model), "--seed", str(seed), "--steps", str(steps)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        check=True,
        timeout=LIMIT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    rows = json.loads(done.stdout.splitlines()[-1])
    return {name: [Step(*values) for values in steps] for name, steps in rows.items()}


def _train_seed(model: Path, seed: int, steps: int) -> None:
    """Train all variants of a seed, and print their steps."""
    with tempfile.TemporaryDirectory(prefix="etude-variants-") as name:
        training = Reinforcement(model, Path(name), Recipe(steps=steps), seed)
        found: dict[str, Sequence[Step]] = dict(asyncio.run(training.run(ARMS)))
        print(json.dumps(found), flush=True)
    os._exit(0)  # the engine's threads would be waited for


if __name__ == "__main__":
    main()
