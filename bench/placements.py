"""How many environments a second one broker places, how long that takes, and what heartbeats cost.

python bench/placements.py [--rate N] [--seconds N] [--core N]

Broker, clients and 100 nodes of 600 slots in one process on one core, launches of 8 siblings in an
open loop: what the decisions cost. Their clock is the process's CPU time, waiting skipped: as if
the core were ours alone. bench/scale.py measures brokers over gRPC, and the death of one.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from broker_bench import decisions, heartbeats
from rich.console import Console
from rich.table import Table

OUT = Path(__file__).parent / "out" / "env.json"
TARGET_PER_S, TARGET_P99_MS = 5_000, 20


def main() -> None:
    """Print the table and merge the figures into bench/out/env.json."""
    options = _options()
    load = os.getloadavg()[0]
    decided = decisions.measure(options.rate, options.seconds, options.core)
    beats = heartbeats.measure()
    found: dict[str, Any] = {
        "placements_per_s": round(decided.per_second),
        "placements_p99_ms": round(decided.quantile(0.99), 2),
        "placements_p50_ms": round(decided.quantile(0.5), 2),
        "placements_per_cpu_s": round(decided.per_cpu_second),
        "placements_rss_mib": round(decided.rss_mib),
        "heartbeat_whole_ms": round(beats.whole_ms, 3),
        "heartbeat_changes_ms": round(beats.changes_ms, 3),
        "placements_load_average": load,
    }
    _print(decided, beats)
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(known | found, indent=2) + "\n")


def _print(decided: decisions.Outcome, beats: heartbeats.HeartbeatCosts) -> None:
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
        f"a heartbeat of {heartbeats.LEASES} leases, {heartbeats.CHANGED} new",
        f"{beats.changes_ms:.3f} CPU-ms, {beats.changes_bytes} bytes",
        f"{beats.ratio:.1f} x less than whole: {beats.whole_ms:.3f} CPU-ms,"
        f" {beats.whole_bytes} bytes",
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
