"""A task set of 10,000 rows: its import, its audit, and the start of a run on it.

python bench/task_stream.py [--rows 10000]

The rows are of SWE-bench, each with an image by digest, so that the repository stays there. Every
stage is a process of its own, as `etude tasks` and a trainer are. The limit is a tenth of the rows:
a stage that streams needs the same memory for both, and the same time for each row.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do

from tests.support import figures
from tests.support.environments import swebench_rows

IMAGE = f"docker.io/swebench/sweb.eval.x86_64.{{instance}}@sha256:{'0' * 64}"
_START = """
import sys
from etude.common.api.storage import StoreAccess
from etude.common.stores import open_source
from etude.trainer.controller.admission import plans, tasks
from etude.trainer.controller.admission.task_choice import open_choice
from etude.trainer.controller.journal.ledger import Ledger
from etude.trainer.rollouts.tasks import find_tasks
found = find_tasks(open_source(sys.argv[1], StoreAccess()), name="train", environment="repos")
order = tasks.TaskOrder(tasks=found, seed=0)
choice = open_choice(order, None, at='')
assert len(choice.upcoming(Ledger(), plans.WAVES * 64)) == plans.WAVES * 64
print(len(order))
"""
"""What a run does with its tasks before its first group, and again when it resumes."""
STAGES = ("import", "audit", "start of a run")


class StageCost(NamedTuple):
    """Cost of one stage."""

    wall_s: float
    cpu_s: float
    """Of the process and of those that it started."""
    peak_mib: float


def main() -> None:
    """Measure, print, and write bench/out/task_stream.json."""
    given = _arguments()
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        few = dict(_measure(Path(name) / "few", given.rows // 10))
        many = dict(_measure(Path(name) / "many", given.rows))
    table = Table("stage", "rows/s", "CPU s", "peak MiB", "of a tenth", "seconds a row, of a tenth")
    numbers: dict[str, int | float] = {"rows": given.rows}
    for stage in STAGES:
        memory = many[stage].peak_mib / few[stage].peak_mib
        pace = many[stage].wall_s / (10 * few[stage].wall_s)
        rate = given.rows / many[stage].wall_s
        cells = (f"{rate:.0f}", f"{many[stage].cpu_s:.1f}", f"{many[stage].peak_mib:.0f}")
        table.add_row(stage, *cells, f"{memory:.2f} x", f"{pace:.2f} x")
        key = stage.split()[0]
        numbers |= {
            f"{key}_rows_per_s": round(rate, 1),
            f"{key}_wall_s": round(many[stage].wall_s, 2),
            f"{key}_cpu_s": round(many[stage].cpu_s, 2),
            f"{key}_peak_mib": round(many[stage].peak_mib, 1),
            f"{key}_memory_ratio": round(memory, 3),
            f"{key}_pace_ratio": round(pace, 3),
        }
    Console(width=None if os.isatty(1) else 120).print(table)
    figures.record("task_stream", **numbers)


def _measure(folder: Path, rows: int) -> Iterator[tuple[str, StageCost]]:
    """Each stage on a new set of rows."""
    row = swebench_rows.made(folder)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for number in range(rows):
            file.write(json.dumps(row | {"instance_id": f"us__shop-{number}"}) + "\n")
    out = folder / "tasks"
    words = ("swebench", str(folder / "rows.jsonl"), "--repositories", str(folder / "mirrors"))
    module = "etude.envserver.tasks.formats.command"
    more = ("--out", str(out), "--pin", "--image", IMAGE)
    yield "import", _run("-m", module, *words, *more)
    yield "audit", _run("-m", "etude.envserver.tasks.audit", str(out))
    yield "start of a run", _run("-c", _START, out.as_uri())


def _run(*words: str) -> StageCost:
    """Run Python to its end.

    Raises:
        RuntimeError: it failed.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    said = process.stderr.read() if process.stderr is not None else b""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in {0, 1}:
        raise RuntimeError(said[-2_000:].decode(errors="replace"))
    wall_s = time.monotonic() - started
    return StageCost(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000, help="tasks of the set")
    return parser.parse_args()


if __name__ == "__main__":
    main()
