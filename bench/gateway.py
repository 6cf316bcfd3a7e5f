"""CPU of the gateway for one turn: first, continued, and streamed ones.

python bench/gateway.py [--turns N]

rLLM's gateway, in a virtual environment of its own, answers the same requests in the same run, from
an engine that speaks HTTP. It has no TLS and no tokenizer, and keeps turns in SQLite.

A real gateway process serves an engine process that costs nothing, with the tokenizer and template
of Qwen 3, TLS on the port, and a record of each turn made durable in a folder. Counted is the CPU
time of the gateway's process alone, by the kernel. A first turn has 7 KB of text that the gateway
has not seen; a continued one adds 200 characters to a conversation of 7 KB and more; each is
answered with 256 tokens and their log-probabilities.

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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway_bench import peers
from tests.support import pki
from tests.support.chat_families import family_folder
from tests.support.figures import record

from etude.common.api_keys import make_key
from etude.common.blobs import open_store
from etude.common.tls.identity import Identity
from etude.common.turn_log import read_turns

ROOT = Path(__file__).parents[1]
START_S = 60
WARM_UP = 20
CONTINUED = "cpu_ms_per_request"
TURNS = {"cpu_ms_first_turn": "first", CONTINUED: "continued", "cpu_ms_streamed_turn": "streamed"}
TICKS = os.sysconf("SC_CLK_TCK")
FRESH = "A line of a file that a user pasted, with some names and numbers in it: x_17 = f(42).\n"
TURNS_PER_CONVERSATION = 10


def main() -> None:
    """Print the table and write bench/out/gateway.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--peer-turns", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = asyncio.run(_measure(Path(name), options.turns))
    own = {key: value for key, value in figures.items() if key in TURNS}
    by_gateway = {"etude": own} | _measure_peers(options.peer_turns, figures)
    table = Table("CPU ms of a turn", *TURNS.values())
    for name, each in by_gateway.items():
        table.add_row(name, *(f"{each[key]:.2f}" for key in TURNS))
    Console().print(table)
    for key in (key for key in figures if key.startswith("absent_")):
        Console().print(f"{key.removeprefix('absent_')} is not measured: {figures[key]}")
    Console().print("Goal: 1.5 ms for a continued turn.")
    record("gateway", **figures)


def _measure_peers(turns: int, figures: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Measure the other gateways, and compare those that keep what they served with ours."""
    measured: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, peers.serve_engine() as engine:
        for peer in peers.PEERS:
            try:
                with peers.serve_peer(peer, Path(name) / peer.name, engine) as (pid, url):
                    measured[peer.name] = asyncio.run(_measure_peer(pid, url, turns))
            except (peers.AbsentError, httpx.HTTPError) as error:
                figures[f"absent_{peer.name}"] = str(error)
                continue
            figures |= {f"{peer.name}_{key}": each for key, each in measured[peer.name].items()}
    captures = [
        measured[peer.name][CONTINUED]
        for peer in peers.PEERS
        if peer.captures and peer.name in measured
    ]
    if captures:
        figures["ratio_to_best_peer"] = min(captures) / figures[CONTINUED]
    return measured


async def _measure_peer(pid: int, url: str, turns: int) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return await _count_cpu(pid, client, turns)


async def _count_cpu(pid: int, client: httpx.AsyncClient, turns: int) -> dict[str, float]:
    """CPU of each kind of turn, in milliseconds."""
    await _converse(client, WARM_UP, stream=False)
    figures = {"cpu_ms_first_turn": await _cpu_ms(pid, _ask_first(client, turns), turns)}
    for name, stream in ((CONTINUED, False), ("cpu_ms_streamed_turn", True)):
        # The first turn of each conversation is not counted.
        figures[name] = await _continued_ms(pid, client, turns, stream=stream)
    return figures


async def _measure(folder: Path, turns: int) -> dict[str, Any]:
    with _processes(folder) as (process, key, port):
        async with _client(folder, key, port) as client:
            figures: dict[str, Any] = {**await _count_cpu(process.pid, client, turns)}
        process.terminate()
        process.wait(60)
        figures["turns"] = turns
        figures["records"] = sum(1 for _ in read_turns(open_store((folder / "store").as_uri())))
    return figures


async def _ask_first(client: httpx.AsyncClient, turns: int) -> None:
    for number in range(turns):
        await _ask(client, [_user(f"Question {number}.\n" + FRESH * 80)], stream=False)


async def _converse(client: httpx.AsyncClient, turns: int, *, stream: bool) -> None:
    for _ in range(max(1, turns // TURNS_PER_CONVERSATION)):
        messages = await _open(client, stream=stream)
        for _ in range(TURNS_PER_CONVERSATION):
            await _continue(client, messages, stream=stream)


async def _continued_ms(pid: int, client: httpx.AsyncClient, turns: int, *, stream: bool) -> float:
    spent_s, count = 0.0, 0
    while count < turns:
        messages = await _open(client, stream=stream)
        before_s = _cpu_s(pid)
        for _ in range(TURNS_PER_CONVERSATION):
            await _continue(client, messages, stream=stream)
            count += 1
        spent_s += _cpu_s(pid) - before_s
    return 1000 * spent_s / count


async def _open(client: httpx.AsyncClient, *, stream: bool) -> list[dict[str, str]]:
    messages = [_user(f"Question {time.time_ns()}.\n" + FRESH * 80)]
    messages.append({"role": "assistant", "content": await _ask(client, messages, stream=stream)})
    return messages


async def _continue(
    client: httpx.AsyncClient, messages: list[dict[str, str]], *, stream: bool
) -> None:
    messages.append(_user(f"And {time.time_ns()}? " + FRESH * 2))
    messages.append({"role": "assistant", "content": await _ask(client, messages, stream=stream)})


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def _ask(client: httpx.AsyncClient, messages: list[dict[str, str]], *, stream: bool) -> str:
    body = {"model": "bench", "messages": messages, "stream": stream}
    answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    if not stream:
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text
    chunks: list[Any] = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


async def _cpu_ms(pid: int, work: Coroutine[Any, Any, None], count: int) -> float:
    before_s = _cpu_s(pid)
    await work
    return 1000 * (_cpu_s(pid) - before_s) / count


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
    port = peers.free_port()
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
