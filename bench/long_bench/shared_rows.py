"""A long row whose tokens two ranks share over gloo, against one rank."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.support.trainer.long_context_ranks import RANKS, compare_long_rows

TOKENS = 65_536
MOST_DIFFERENCE = 1e-6


def compare(*, tokens: int = TOKENS) -> dict[str, float]:
    """Compare loss, gradients and costs; print them, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        found = compare_long_rows(Path(name), tokens=tokens)
    whole, shared = found.whole, found.shared
    table = Table("ranks", "loss", "CPU s a rank", "wall s", "MiB a rank")
    for ranks, each in ((1, whole), (RANKS, shared)):
        table.add_row(
            str(ranks),
            f"{each.loss:.7f}",
            f"{each.cpu_s:.1f}",
            f"{each.wall_s:.1f}",
            f"{each.more_bytes / 2**20:.0f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{tokens:,} tokens in one row. Relative difference of the loss"
        f" {found.loss_difference:.1e}, of any tensor's gradient"
        f" {shared.largest_difference:.1e}."
    )
    return {
        "shared_row_tokens": tokens,
        "shared_row_loss_difference": found.loss_difference,
        "shared_row_gradient_difference": shared.largest_difference,
        "shared_row_cpu_ratio": round(RANKS * shared.cpu_s / whole.cpu_s, 3),
        "shared_row_wall_ratio": round(shared.wall_s / whole.wall_s, 3),
        "shared_row_memory_ratio": round(shared.more_bytes / whole.more_bytes, 3),
    }


def is_equal(found: Mapping[str, float]) -> bool:
    """True if the figures meet the goal."""
    names = ("shared_row_loss_difference", "shared_row_gradient_difference")
    return max(found[name] for name in names) <= MOST_DIFFERENCE
