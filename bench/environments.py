"""What one training step costs in environments: leases, tool calls, gradings, by CPU-milliseconds.

python bench/environments.py [--rollouts N]

Broker, node and sandboxes run as in production; this process is the client. Wall time says as much
about the neighbours as about us, so CPU time of each process tree is the figure to watch.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from environment_bench.pool import DEADLINE_S, TICK_MS, Client, Pool, running

from etude.agent import minitest
from etude.v1 import environments_pb2

OUT = Path(__file__).parent / "out" / "environments.json"
FILES = {
    "shop/core.py": "def add_price(a, b):\n    return a - b\n",
    "shop/calc.py": "def half_item(n):\n    return n // 2\n",
    "shop/data.py": "def total_score(items):\n    return sum(items)\n",
    "tests/test_repo.py": "from shop.core import add_price\nfrom shop.calc import half_item\n"
    "from shop.data import total_score\n\ndef test_add_price():\n    assert add_price(1, 2) == 3\n"
    "\ndef test_half_item():\n    assert half_item(4) == 2\n"
    "\ndef test_total_score():\n    assert total_score([1, 2]) == 3\n",
}
VERIFIER = (
    "import os, sys\nsys.path.insert(0, '/workspace')\nfrom shop.core import add_price\n"
    "os.makedirs('/logs/verifier')\n"
    "open('/logs/verifier/reward.txt', 'w').write(str(int(add_price(2, 2) == 4)))\n"
)
SLOTS = 256
TASKS = 16
"""Sources; siblings of one task share one."""


class Bench:
    """A pool with driver Process, and its client."""

    def __init__(self, pool: Pool, client: Client, folder: Path) -> None:
        self.pool, self.client, self.folder = pool, client, folder

    async def launch(self, count: int, task: int) -> list[environments_pb2.Lease]:
        return await self.client.launch(count, uri=(self.folder / str(task)).as_uri())

    async def call(
        self, lease: environments_pb2.Lease, name: str, arguments: Mapping[str, object]
    ) -> None:
        (result,) = await self.client.turn(lease, (name, arguments))
        if result.is_error:
            raise RuntimeError(f"{name}: {result.content.decode()}")

    async def grade(self, lease: environments_pb2.Lease, content: str) -> None:
        written = environments_pb2.WorkspaceFile(path="shop/core.py", content=content.encode())
        job = environments_pb2.GradeJob(
            diff=environments_pb2.WorkspaceDiff(written=[written]),
            files=[environments_pb2.WorkspaceFile(path="verify.py", content=VERIFIER.encode())],
            command="python3 /tests/verify.py",
            timeout_seconds=60,
            reward_path="/logs/verifier/reward.txt",
        )
        request = environments_pb2.GradeRequest(
            lease_id=lease.lease_id,
            control_token=lease.control_token,
            chunk=job.SerializeToString(),
        )
        await self.client.node.Grade(iter([request]), timeout=DEADLINE_S)

    def cpu_ms(self) -> dict[str, float]:
        """CPU time of broker, host and sandboxes until now."""
        processes = (self.pool.broker, self.pool.node)
        broker, host = (process.pid for process in processes if process is not None)
        outer = children(host)[0]
        server = children(outer)[0]
        return {
            "broker": stat_ms(broker),
            "node": stat_ms(host),
            # The server has waited for every supervisor, and these for every command.
            "sandboxes": stat_ms(server, reaped=True),
        }


def children(process: int) -> list[int]:
    """Processes that this one started."""
    return [
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def stat_ms(process: int, *, reaped: bool = False) -> float:
    """CPU time of a process, in milliseconds, and of those that it has waited for."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if reaped else 13])) * TICK_MS


@asynccontextmanager
async def serving() -> AsyncIterator[Bench]:
    """Broker and host of one pool, and sources of its tasks."""
    with tempfile.TemporaryDirectory() as name:
        tasks = Path(name, "tasks")
        for task in range(TASKS):
            for path, text in FILES.items():
                target = tasks / str(task) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(f"{text}# task {task}\n")
        async with running(Path(name), None, slots=SLOTS) as (pool, client):
            yield Bench(pool, client, tasks)


class Stage:
    """Prints and keeps what a stage cost per unit."""

    def __init__(self, bench: Bench, figures: dict[str, float]) -> None:
        self.bench = bench
        self.figures = figures

    @asynccontextmanager
    async def measured(self, name: str, count: int) -> AsyncIterator[None]:
        before, started_s = self.bench.cpu_ms(), time.perf_counter()
        yield
        wall_ms = 1000 * (time.perf_counter() - started_s)
        after = self.bench.cpu_ms()
        used = {part: (after[part] - before[part]) / count for part in after}
        parts = "  ".join(f"{part} {value:6.2f}" for part, value in used.items())
        print(f"{name:34} {count:5}  wall ms {wall_ms / count:7.2f}  CPU ms: {parts}")
        self.figures[f"{name}_wall_ms"] = round(wall_ms / count, 3)
        for part, value in used.items():
            self.figures[f"{name}_{part}_cpu_ms"] = round(value, 3)


async def step(bench: Bench, rollouts: int, figures: dict[str, float]) -> None:
    """What the rollouts of one training step do, a kind of call at a time."""
    stage = Stage(bench, figures)
    group = rollouts // TASKS
    async with stage.measured("launch", rollouts):
        batches = [bench.launch(group, task) for task in range(TASKS)]
        groups = await asyncio.gather(*batches)
    leases = [(task, lease) for task, found in enumerate(groups) for lease in found]
    read = {"path": "shop/core.py"}
    for name, repeats, tool, arguments in (
        ("first_read", 1, "read_file", read),
        ("read_file", 4, "read_file", read),
        ("grep", 1, "grep", {"pattern": "add_price"}),
        ("pytest_same_files", 1, "run_terminal", {"command": "pytest -q"}),
    ):
        async with stage.measured(name, repeats * len(leases)):
            for _ in range(repeats):
                await asyncio.gather(*(bench.call(lease, tool, arguments) for _, lease in leases))
    async with stage.measured("search_replace", len(leases)):
        await asyncio.gather(
            *(
                bench.call(
                    lease,
                    "search_replace",
                    {"path": "shop/core.py", "old_string": "a - b", "new_string": f"a + b + {n}"},
                )
                for n, (_, lease) in enumerate(leases)
            )
        )
    for name, command in (("pytest_own_files", "pytest -q"), ("shell_command", "echo done")):
        async with stage.measured(name, len(leases)):
            given = {"command": command}
            await asyncio.gather(*(bench.call(lease, "run_terminal", given) for _, lease in leases))
    async with stage.measured("grade_own_files", len(leases)):
        await asyncio.gather(
            *(
                bench.grade(lease, f"def add_price(a, b):\n    return a + b + {n}\n")
                for n, (_, lease) in enumerate(leases)
            )
        )
    async with stage.measured("release", len(leases)):
        await bench.client.release([lease for _, lease in leases])


def plain_cpu_ms(command: Sequence[str], folder: Path, repeats: int = 20) -> float:
    """CPU time of a command without any sandbox, service or lease around it."""
    before = os.times()
    for _ in range(repeats):
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user - before.children_user
    return 1000 * (used + after.children_system - before.children_system) / repeats


def ratios(figures: Mapping[str, float]) -> dict[str, float]:
    """Our CPU time against the same work as a bare process of this machine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, text in FILES.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace("a - b", "a + b"))
        peers = {
            "shell_command": plain_cpu_ms(["sh", "-c", "echo done"], folder),
            "pytest_own_files": plain_cpu_ms([sys.executable, "-B", minitest.__file__], folder),
        }
    parts = ("broker", "node", "sandboxes")
    return {
        name: sum(figures[f"{name}_{part}_cpu_ms"] for part in parts) / peer_ms
        for name, peer_ms in peers.items()
    }


async def measure(rollouts: int) -> None:
    """Run, print, keep the figures."""
    figures: dict[str, float] = {"rollouts": rollouts}
    async with serving() as bench:
        await step(bench, rollouts, figures)
    for name, ratio in ratios(figures).items():
        print(f"{name:34} {ratio:5.2f} times the CPU of a bare process")
        figures[f"{name}_cpu_ratio"] = round(ratio, 3)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=128, help="a multiple of 16")
    asyncio.run(measure(parser.parse_args().rollouts))
