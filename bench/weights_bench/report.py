"""Rows as a table for people, and figures beside their targets."""

from collections.abc import Iterable, Mapping

from rich.table import Table

from weights_bench.clock import Cost
from weights_bench.figures import BASELINE, TARGETS, Rows

_COLUMNS = (
    "codec",
    "wire kB",
    "full / wire",
    "XOR / wire",
    "bits/change",
    "encode GB/s",
    "encode CPU ms",
    "apply GB/s",
    "CPU ms",
    "wall ms",
    "commit ms",
    "memory % send",
    "receive",
)


def codec_table(title: str, rows: Rows, bound: float, copied: Cost) -> Table:
    """One trajectory; speeds are bytes of the model per CPU second."""
    table = Table(*_COLUMNS, title=title, title_justify="left", box=None)
    baseline = rows[BASELINE]
    for row in rows.values():
        table.add_row(
            row.codec,
            f"{row.wire_bytes / 1e3:,.0f}",
            f"{row.ratio:,.1f}",
            f"{baseline.wire_bytes / row.wire_bytes:.2f}",
            f"{row.bits_per_change:.2f}",
            f"{row.encode_gb_per_s:.2f}",
            f"{row.encode.cpu_s * 1e3:,.1f}",
            f"{row.apply_gb_per_s:.2f}",
            f"{row.apply.cpu_s * 1e3:,.1f}",
            f"{row.apply.wall_s * 1e3:,.1f}",
            f"{row.commit.cpu_s * 1e3:,.2f}",
            f"{row.sender_memory_pct:.1f}",
            f"{row.receiver_memory_pct:.1f}",
        )
    table.caption = (
        f"bound {bound:.2f} bits/change; memcpy {copied.cpu_s * 1e3:.1f} ms CPU,"
        f" {copied.wall_s * 1e3:.1f} ms wall"
    )
    return table


def pause_table(costs: Mapping[str, Cost]) -> Table:
    """Ways to change the live weights."""
    table = Table("swap", "CPU ms", "wall ms", "/ memcpy", box=None)
    copied = costs["memcpy of the model"].cpu_s
    for name, cost in costs.items():
        table.add_row(
            name,
            f"{cost.cpu_s * 1e3:,.2f}",
            f"{cost.wall_s * 1e3:,.2f}",
            f"{cost.cpu_s / copied:.2f}",
        )
    return table


def verdicts(figures: Mapping[str, object]) -> Iterable[str]:
    """Each target that was measured, hit or missed."""
    for target in TARGETS:
        value = figures.get(target.figure)
        if isinstance(value, float):
            word = "hit   " if target.holds(value) else "MISSED"
            sign = ">=" if target.at_least else "<="
            yield f"{word} {target.figure} {value:.2f} ({sign} {target.limit:g}: {target.about})"
