"""CPU and time that the gateway adds to one turn: first, continued, and streamed ones.

python bench/gateway.py [--turns N]

The gateways of others, each in a virtual environment of its own, answer the same requests in the
same run, from an engine that speaks HTTP. They have no TLS and no tokenizer. rLLM's keeps turns in
SQLite, Agent Lightning's in its memory, and LiteLLM's proxy keeps none.

A real gateway process serves an engine process that costs nothing, with the tokenizer and template
of Qwen 3, TLS on the port, and a record of each turn made durable in a folder. Counted is the CPU
time of the gateway's process alone, by the kernel. A first turn has 7 KB of text that the gateway
has not seen; a continued one adds 200 characters to a conversation of 7 KB and more; each is
answered with 256 tokens and their log-probabilities. Added times are the client's with a gateway
less those with the engine itself: by gRPC for ours, by HTTP for the others.

Examples:
  make bench-gateway             the table, and its file
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway_bench import peers
from gateway_bench.conversations import (
    CONTINUED,
    FIRST,
    STREAMED,
    Conversations,
    measure_engine,
    subtract_times,
)
from tests.support import pki
from tests.support.chat_families import family_folder
from tests.support.figures import record
from tests.support.free_ports import reserve_port
from tests.support.programs import AbsentError

from etude.common.api_keys import make_key
from etude.common.blobs import open_store
from etude.common.rpc.channels import dial
from etude.common.tls.identity import Identity
from etude.common.turns.turn_log import read_turns

ROOT = Path(__file__).parents[1]
START_S = 300
TICKS = os.sysconf("SC_CLK_TCK")
COLUMNS = {
    "first": FIRST,
    "continued": CONTINUED,
    "streamed": STREAMED,
    "+p50": "added_p50_ms",
    "+p99": "added_p99_ms",
    "streamed +p50": "added_streamed_p50_ms",
    "streamed +p99": "added_streamed_p99_ms",
}


def main() -> None:
    """Print the table and write bench/out/gateway.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--peer-turns", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = asyncio.run(_measure(Path(name), options.turns))
    measured, absent = _measure_peers(options.peer_turns)
    own = {key: figures[key] for key in COLUMNS.values()}
    for name, each in measured.items():
        figures |= {f"{name}_{key}": value for key, value in each.items()}
    captures = [
        measured[peer.name][CONTINUED]
        for peer in peers.PEERS
        if peer.name in measured and peer.captures
    ]
    if captures:
        figures["ratio_to_best_peer"] = min(captures) / own[CONTINUED]
    table = Table(
        "", *COLUMNS, title="CPU ms of a turn, and ms added to continued and streamed ones"
    )
    for name, each in ({"etude": own} | measured).items():
        table.add_row(name, *(f"{each[key]:.2f}" for key in COLUMNS.values()))
    Console().print(table)
    for name, reason in absent.items():
        Console().print(f"{name} is not measured: {reason}")
    Console().print("Goal: 1.5 ms for a continued turn.")
    record("gateway", **figures, **{f"absent_{name}": reason for name, reason in absent.items()})


def _measure_peers(turns: int) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Measure the other gateways; the second are the reasons of those that could not be."""
    measured: dict[str, dict[str, float]] = {}
    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name, peers.serve_engine() as engine:
        bare = asyncio.run(_measure_at(engine.removesuffix("/v1"), turns, lambda: 0.0))
        for peer in peers.PEERS:
            try:
                with peers.serve_peer(peer, Path(name) / peer.name, engine) as (pid, url):
                    figures = asyncio.run(_measure_at(url, turns, partial(_cpu_s, pid)))
            except (AbsentError, httpx.HTTPError) as error:
                absent[peer.name] = str(error) or type(error).__name__
            else:
                measured[peer.name] = subtract_times(figures, bare)
    return measured, absent


async def _measure_at(url: str, turns: int, cpu_s: Callable[[], float]) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return await Conversations(client, cpu_s).measure(turns)


async def _measure(folder: Path, turns: int) -> dict[str, Any]:
    with _processes(folder) as (process, key, port):
        async with _client(folder, key, port) as client:
            served = await Conversations(client, partial(_cpu_s, process.pid)).measure(turns)
        process.terminate()
        process.wait(60)
        channel = dial(f"127.0.0.1:{(folder / 'engine-port').read_text()}")
        figures: dict[str, Any] = {**subtract_times(served, await measure_engine(channel, turns))}
        await channel.close()
        figures["turns"] = turns
        figures["records"] = sum(1 for _ in read_turns(open_store((folder / "store").as_uri())))
    return figures


def _cpu_s(pid: int) -> float:
    """CPU time of a process with all its threads and children, in seconds."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = (int(values[11]) + int(values[12])) / TICKS
    return own + sum(_cpu_s(int(child)) for child in children)


@contextlib.contextmanager
def _processes(folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str, int]]:
    """Start an engine and a gateway; yields the gateway's process, a key and its port."""
    model = family_folder("qwen3")
    paths = f"{ROOT / 'bench'}:{ROOT}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    port_file = folder / "engine-port"
    engine = subprocess.Popen(
        [sys.executable, "-m", "gateway_bench.engine", str(model), str(port_file)],
        env=environment,
    )
    key, line = make_key("bench", "serve")
    (folder / "keys").write_text(f"{line} consent=v1 limit=1000000\n")
    pki.write(folder / "tls", pki.Authority().issue(Identity(domain="bench", namespace="bench")))
    port = reserve_port()
    try:
        _wait_for(port_file.exists)
        route = {
            "model": "bench",
            "modelUri": model.as_uri(),
            "stable": [f"127.0.0.1:{port_file.read_text()}"],
            "storage": {"uri": (folder / "store").as_uri()},
            "recordUnencrypted": True,
        }
        (folder / "route.json").write_text(json.dumps(route))
        settings = {
            "ETUDE_GATEWAY_ROUTE": str(folder / "route.json"),
            "ETUDE_GATEWAY_KEYS": str(folder / "keys"),
            "ETUDE_GATEWAY_TLS": str(folder / "tls"),
            "ETUDE_SCRATCH": str(folder / "scratch"),
            "ETUDE_PORT": str(port),
            "ETUDE_PROBE_PORT": "0",
        }
        gateway = subprocess.Popen(
            [sys.executable, "-m", "etude.gateway.main"], env=environment | settings
        )
        try:
            _wait_for(lambda: _listens(port))
            yield gateway, key, port
        finally:
            gateway.kill()
    finally:
        engine.kill()


@contextlib.asynccontextmanager
async def _client(folder: Path, key: str, port: int) -> AsyncIterator[httpx.AsyncClient]:
    context = ssl.create_default_context(cafile=folder / "tls" / "ca.crt")
    context.check_hostname = False
    async with httpx.AsyncClient(
        base_url=f"https://127.0.0.1:{port}",
        headers={"authorization": f"Bearer {key}"},
        verify=context,
        timeout=60,
    ) as client:
        yield client


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _wait_for(holds: Callable[[], bool]) -> None:
    """Wait for a process to start.

    Raises:
        TimeoutError: it did not.
    """
    deadline_s = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError("a process did not start: see its messages")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
