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
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from socket import socket

from etude.agent import minitest
from etude.common.rpc import channels
from etude.v1 import environments_pb2, environments_pb2_grpc

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
TASKS = 16
"""Sources; siblings of one task share one."""


class Bench:
    """Clients and process ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = [free_port() for _ in range(4)]
        self.pids: dict[str, int] = {}
        self.broker = environments_pb2_grpc.EnvBrokerServiceStub(
            channels.dial(f"127.0.0.1:{self.ports[0]}")
        )
        self.node = environments_pb2_grpc.EnvNodeServiceStub(
            channels.dial(f"127.0.0.1:{self.ports[1]}")
        )

    async def launch(self, key: str, count: int, task: int) -> list[environments_pb2.Lease]:
        request = environments_pb2.LaunchBatchRequest(
            run_id="bench",
            idempotency_key=key,
            template="python",
            workspace=environments_pb2.WorkspaceSource(uri=f"file://{self.folder}/tasks/{task}"),
            count=count,
            toolset="Compact",
        )
        call = self.broker.LaunchBatch(request, timeout=120)
        return [outcome.lease async for outcome in call]

    async def release(self, leases: list[environments_pb2.Lease]) -> None:
        ids = [lease.lease_id for lease in leases]
        request = environments_pb2.ReleaseLeasesRequest(lease_ids=ids)
        await self.broker.ReleaseLeases(request, timeout=120)

    async def call(
        self, lease: environments_pb2.Lease, call_id: str, name: str, arguments: Mapping[str, str]
    ) -> bytes:
        request = environments_pb2.RunTurnRequest(
            lease_id=lease.lease_id,
            agent_token=lease.agent_token,
            calls=[
                environments_pb2.ToolCall(
                    call_id=call_id, name=name, arguments_json=json.dumps(arguments)
                )
            ],
        )
        return (await self.node.RunTurn(request, timeout=120)).results[0].content

    async def grade(self, lease: environments_pb2.Lease, content: str) -> bytes:
        job = environments_pb2.GradeJob(
            diff=environments_pb2.WorkspaceDiff(
                written=[
                    environments_pb2.WorkspaceFile(path="shop/core.py", content=content.encode())
                ]
            ),
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
        return (await self.node.Grade(iter([request]), timeout=120)).reward_file

    def cpu_ms(self) -> dict[str, float]:
        """CPU time of broker, node and sandboxes until now."""
        node = self.pids["node"]
        outer = children(node)[0]
        server = children(outer)[0]
        return {
            "broker": stat_ms(self.pids["broker"]),
            "node": stat_ms(node),
            # The server has waited for every supervisor, and these for every command.
            "sandboxes": stat_ms(server, reaped=True),
        }


def free_port() -> int:
    """A port that nobody listens on."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
    ticks = sum(map(int, fields[11 : 15 if reaped else 13]))
    return 1000 * ticks / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    """Broker and node of one pool."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for task in range(TASKS):
            for path, text in FILES.items():
                target = folder / "tasks" / str(task) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(f"{text}# task {task}\n")
        spec = {
            "templates": [{"name": "python", "trust": "Trusted"}],
            "isolation": {"minimum": "Process"},
            "slotsPerReplica": 256,
        }
        (folder / "pool.json").write_text(json.dumps({"name": "b", "uid": "b", "spec": spec}))
        bench = Bench(folder)
        processes = [start(bench, role, number) for number, role in enumerate(("broker", "node"))]
        try:
            for port in bench.ports[2:]:
                await ready(port)
            yield bench
        finally:
            for process in processes:
                process.terminate()
                process.wait(30)


def start(bench: Bench, role: str, number: int) -> "subprocess.Popen[bytes]":
    """Start a role as its container would."""
    environment = {
        "PATH": os.environ["PATH"],
        "ETUDE_POOL_FILE": str(bench.folder / "pool.json"),
        "ETUDE_PORT": str(bench.ports[number]),
        "ETUDE_PROBE_PORT": str(bench.ports[number + 2]),
        "ETUDE_POD": role,
        "ETUDE_BROKER_TARGET": f"127.0.0.1:{bench.ports[0]}",
        "ETUDE_SCRATCH": str(bench.folder / "scratch"),
        "ETUDE_TRACES_FILE": str(bench.folder / "traces.jsonl"),
    }
    command = [sys.executable, "-m", "etude.envserver.main", role]
    process = subprocess.Popen(command, env=environment)
    bench.pids[role] = process.pid
    return process


async def ready(port: int) -> None:
    """Wait for a role."""
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(answers, f"http://127.0.0.1:{port}/readyz"):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.1)


def answers(url: str) -> bool:
    """Whether somebody says that all is well."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - our own port
            return bool(answer.status == 200)
    except OSError:
        return False


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
        batches = [bench.launch(f"g{task}", group, task) for task in range(TASKS)]
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
            for turn in range(repeats):
                await asyncio.gather(
                    *(bench.call(lease, f"{name}{turn}", tool, arguments) for _, lease in leases)
                )
    async with stage.measured("search_replace", len(leases)):
        await asyncio.gather(
            *(
                bench.call(
                    lease,
                    "edit",
                    "search_replace",
                    {"path": "shop/core.py", "old_string": "a - b", "new_string": f"a + b + {n}"},
                )
                for n, (_, lease) in enumerate(leases)
            )
        )
    for name, command in (("pytest_own_files", "pytest -q"), ("shell_command", "echo done")):
        async with stage.measured(name, len(leases)):
            given = {"command": command}
            await asyncio.gather(
                *(bench.call(lease, name, "run_terminal", given) for _, lease in leases)
            )
    async with stage.measured("grade_own_files", len(leases)):
        await asyncio.gather(
            *(
                bench.grade(lease, f"def add_price(a, b):\n    return a + b + {n}\n")
                for n, (_, lease) in enumerate(leases)
            )
        )
    async with stage.measured("release", len(leases)):
        await bench.release([lease for _, lease in leases])


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
    async with running() as bench:
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
