"""How many environments a second one broker places, how long that takes, and what a kill costs.

python bench/placements.py [--rate N] [--seconds N] [--core N]

First broker, clients and 100 nodes of 600 slots in one process on one core, launches of 8 siblings
in an open loop: what the decisions cost. Their clock is the process's CPU time, waiting skipped: as
if the core were ours alone. Then two broker processes on that core, nodes and clients
over gRPC in this one; one broker is killed and started again under load. The limit beside it is an
empty call to a gRPC server of ours on the same core; of these, take the figures per CPU second.
"""

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from broker_bench import decisions, echo, heartbeats, shards
from rich.console import Console
from rich.table import Table

OUT = Path(__file__).parent / "out" / "env.json"
TARGET_PER_S, TARGET_P99_MS = 5_000, 20
WIRE_RATE = 400.0
"""Placements a second while a broker is killed: nodes and clients share the other core."""


def main() -> None:
    """Print the table and merge the figures into bench/out/env.json."""
    options = _options()
    load = os.getloadavg()[0]
    decided = decisions.measure(options.rate, options.seconds, options.core)
    beats = heartbeats.measure()
    with tempfile.TemporaryDirectory() as folder:
        calls, wire, survival = asyncio.run(_over_the_wire(Path(folder), options))
    found: dict[str, Any] = {
        "placements_per_s": round(decided.per_second),
        "placements_p99_ms": round(decided.quantile(0.99), 2),
        "placements_p50_ms": round(decided.quantile(0.5), 2),
        "placements_per_cpu_s": round(decided.per_cpu_second),
        "placements_rss_mib": round(decided.rss_mib),
        "placements_wire_per_cpu_s": round(wire.placed / wire.broker_cpu_s),
        "placements_wire_per_s": round(wire.placed / wire.wall_s),
        "placements_echo_per_cpu_s": round(calls),
        "placements_to_echo_ratio": round(wire.placed / wire.broker_cpu_s / calls, 2),
        "placements_kill": survival._asdict(),
        "heartbeat_whole_ms": round(beats.whole_ms, 3),
        "heartbeat_changes_ms": round(beats.changes_ms, 3),
        "placements_load_average": load,
    }
    _print(found, decided, survival, beats)
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(known | found, indent=2) + "\n")


async def _over_the_wire(
    folder: Path, options: argparse.Namespace
) -> tuple[float, shards.Throughput, shards.Survival]:
    calls = await echo.calls_per_cpu_s(5.0, options.core)
    world = shards.World(folder, options.core)
    try:
        await world.start()
        wire = await shards.throughput(world, seconds=options.seconds / 3, at_once=32)
        survival = await shards.Kill(world, WIRE_RATE, options.seconds).run()
    finally:
        await world.stop()
    return calls, wire, survival


def _print(
    found: dict[str, Any],
    decided: decisions.Outcome,
    survival: shards.Survival,
    beats: heartbeats.HeartbeatCosts,
) -> None:
    table = Table(title="broker: 100 nodes x 600 slots, one core")
    for column in ("figure", "value", "beside it"):
        table.add_column(column)
    table.add_row(
        "decisions, open loop",
        f"{decided.per_second:.0f}/s",
        f"target {TARGET_PER_S}; {decided.per_cpu_second:.0f} per CPU-s"
        f" ({decided.cpu_s:.1f} CPU-s in {decided.core_s:.1f} s)",
    )
    table.add_row(
        "from due to leased",
        f"p99 {decided.quantile(0.99):.1f} ms",
        f"target {TARGET_P99_MS}; p50 {decided.quantile(0.5):.1f} ms",
    )
    table.add_row(
        "over gRPC, per CPU-s of the broker",
        f"{found['placements_wire_per_cpu_s']}",
        f"{found['placements_to_echo_ratio']} x an empty call"
        f" ({found['placements_echo_per_cpu_s']})",
    )
    table.add_row(
        f"a heartbeat of {heartbeats.LEASES} leases, {heartbeats.CHANGED} new",
        f"{beats.changes_ms:.3f} CPU-ms, {beats.changes_bytes} bytes",
        f"{beats.ratio:.1f} x less than whole: {beats.whole_ms:.3f} CPU-ms,"
        f" {beats.whole_bytes} bytes",
    )
    table.add_row(
        "one of two brokers killed",
        f"{survival.held_lost} of {shards.HELD} held leases lost, {survival.doubled} on two nodes,"
        f" {survival.failed} of {survival.launches} launches failed",
        f"grants again {survival.back_s:.1f} s after its start; p99 at the other"
        f" {survival.other_p99_ms:.0f} ms; longest wait {survival.killed_worst_s:.1f} s",
    )
    Console(width=None if os.isatty(1) else 200).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=5_200.0, help="placements a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--core", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
