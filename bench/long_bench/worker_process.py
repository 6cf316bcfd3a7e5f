"""One rollout worker in a process of its own, as Ray starts it, for one group.

python bench/long_bench/worker_process.py reads a pickled WorkerConfig and GroupRequest from its
input, runs the group, and writes a pickled pair: records, and figures by name.
"""

import asyncio
import pickle
import sys
import time
from pathlib import Path

from etude.trainer.rollouts.protocol import GroupRequest, GroupResult, WorkerConfig
from etude.trainer.rollouts.worker import RolloutWorker


def main() -> None:
    """Run the group."""
    config, order = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our own parent
    result, figures = asyncio.run(run(config, order))
    pickle.dump((tuple(result.records), figures), sys.stdout.buffer)


async def run(config: WorkerConfig, order: GroupRequest) -> tuple[GroupResult, dict[str, float]]:
    """Run a group; its result, and figures of this process."""
    worker = RolloutWorker(config)
    started = read_memory("VmRSS")
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = await worker.run_group(order)
    found = {
        "wall_s": time.perf_counter() - wall_s,
        "cpu_s": time.process_time() - cpu_s,
        "start_bytes": started,
        "peak_bytes": read_memory("VmHWM"),
    }
    await worker.close()
    return result, found


def read_memory(name: str) -> int:
    """Memory of this process: VmRSS now, VmHWM at its peak, which leaves its parent out."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (found,) = [line for line in lines if line.startswith(name)]
    return int(found.split()[1]) * 1024


if __name__ == "__main__":
    main()
