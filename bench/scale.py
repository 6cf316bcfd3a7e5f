"""One run with tens of thousands of environments over several brokers, one of which is killed.

python bench/scale.py [--environments N] [--shards N] [--seconds N]

Brokers are real processes; nodes of 150 environments are simulated in this one and talk to them
over gRPC, as do the clients. Everything shares the cores of this machine, so that nodes and clients
are a part of each latency; the limit printed with the placements is an empty call to a gRPC server
of ours. A broker is killed as a lost node is while the run goes on, and never starts again.
"""

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from broker_bench import echo
from rich.console import Console
from rich.table import Table
from scale_bench.brokers import BrokerProcesses
from scale_bench.load import Clients, Loss, Placed
from scale_bench.nodes import make_nodes, serve

OUT = Path(__file__).parent / "out" / "scale.json"
PER_NODE = 150
SPARE = 1.1
"""Slots to environments: some batches wait for a slot that another one leaves."""
ECHO_S = 3.0


def main() -> None:
    """Print the table and write bench/out/scale.json."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_measure(Path(folder), options))
    found["load_average"] = os.getloadavg()[0]
    _print(found)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(found, indent=2) + "\n")


async def _measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    calls = await echo.calls_per_cpu_s(ECHO_S, 0)
    num_nodes = -(-options.environments // PER_NODE)
    brokers = BrokerProcesses(folder, options.shards, round(SPARE * PER_NODE))
    nodes = make_nodes(num_nodes, round(SPARE * PER_NODE), brokers.targets)
    server = await serve(nodes)
    clients = Clients(brokers, nodes)
    for index in range(options.shards):
        brokers.start(index)
    tasks = [
        asyncio.create_task(nodes.beat_for_ever(), name="heartbeats"),
        asyncio.create_task(clients.leases.keep_alive(), name="renewals"),
    ]
    try:
        await clients.wait_for_brokers()
        filled = await clients.fill(options.environments)
        before = nodes.beat_bytes
        steady = await clients.churn(options.seconds)
        beats_per_s = (nodes.beat_bytes - before) / steady.wall_s
        rss_mib = brokers.rss_mib
        during, loss = await clients.lose(0, 2 * options.seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await clients.channel.close()
        await nodes.close()
        brokers.stop()
        await server.stop(0)
    sizes = {"environments": options.environments, "nodes": num_nodes, "shards": options.shards}
    figures = _figures(filled, steady, during, loss)
    rest = {
        "heartbeat_bytes_per_s": round(beats_per_s),
        "broker_rss_mib": [round(each, 1) for each in rss_mib],
        "echo_calls_per_cpu_s": round(calls),
        "to_echo_ratio": round(filled.num / filled.broker_cpu_s / calls, 3),
    }
    return sizes | figures | rest


def _figures(filled: Placed, steady: Placed, during: Placed, loss: Loss) -> dict[str, Any]:
    return {
        "placements_per_s": round(filled.per_s),
        "p99_ms": round(steady.quantile(0.99), 1),
        "lost_leases": loss.lost,
        "p50_ms": round(steady.quantile(0.5), 1),
        "fill_p99_ms": round(filled.quantile(0.99), 1),
        "fill_s": round(filled.wall_s, 1),
        "placements_per_broker_cpu_s": round(filled.num / filled.broker_cpu_s),
        "steady_per_s": round(steady.per_s),
        "steady_broker_cpu_s": round(steady.broker_cpu_s, 1),
        "steady_wall_s": round(steady.wall_s, 1),
        "kill_per_s": round(during.per_s),
        "kill_p99_ms": round(during.quantile(0.99), 1),
        "kill_moved_s": round(loss.moved_s, 2),
        "kill_held": loss.held,
        "kill_doubled": loss.doubled,
        "kill_failed_launches": loss.failed,
    }


def _print(found: dict[str, Any]) -> None:
    title = "{environments} environments of one run, {nodes} nodes, {shards} brokers"
    table = Table(title=title.format(**found))
    for column in ("figure", "value", "of the same run"):
        table.add_column(column)
    rows = (
        (
            "placements, pool filling",
            "{placements_per_s}/s",
            "{placements_per_broker_cpu_s} per CPU-s of brokers, {to_echo_ratio} x an empty call"
            " ({echo_calls_per_cpu_s})",
        ),
        (
            "from launch to lease, pool full",
            "p99 {p99_ms} ms",
            "p50 {p50_ms} ms; {steady_per_s}/s, {steady_broker_cpu_s} CPU-s of brokers in"
            " {steady_wall_s} s",
        ),
        ("heartbeats", "{heartbeat_bytes_per_s} bytes/s", "memory of brokers {broker_rss_mib} MiB"),
        (
            "one broker killed under load",
            "{lost_leases} of {kill_held} leases lost",
            "nodes moved in {kill_moved_s} s; p99 {kill_p99_ms} ms at {kill_per_s}/s;"
            " {kill_doubled} on two nodes, {kill_failed_launches} launches failed",
        ),
    )
    for row in rows:
        table.add_row(*(cell.format(**found) for cell in row))
    Console(width=None if os.isatty(1) else 200).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=int, default=15_000)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    return parser.parse_args()


if __name__ == "__main__":
    main()
