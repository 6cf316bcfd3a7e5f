"""From rows to the numbers that are claimed, and whether they reach their targets."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weights_bench.clock import Cost
from weights_bench.measure import Row

BASELINE = "XOR + zstd-1"
DEFAULT = "L1"
OURS = ("L1", "L2", "L2r")

Rows = Mapping[str, Row]
"""By codec."""


class Target(NamedTuple):
    """What a figure must reach."""

    figure: str
    limit: float
    at_least: bool
    about: str

    def holds(self, value: float) -> bool:
        """Whether a value reaches it."""
        return value >= self.limit if self.at_least else value <= self.limit


TARGETS = (
    Target("wire_ratio", 3.0, at_least=True, about="bytes, XOR + zstd-1 / our best codec"),
    Target("l1_wire_ratio", 1.9, at_least=True, about="bytes, XOR + zstd-1 / L1"),
    Target("l1_decode_speed_ratio", 2.0, at_least=True, about="receiver CPU, baseline / L1"),
    Target("commit_speedup_vs_vllm_sparse", 30.0, at_least=True, about="vLLM's loader / commit"),
    Target("commit_over_memcpy", 0.5, at_least=False, about="commit / memcpy of the model"),
    Target("extra_memory_pct", 10.0, at_least=False, about="on either side, L1, % of model"),
)


def wire_figures(tables: Sequence[Rows]) -> dict[str, float | str]:
    """Geometric means over trajectories of what each codec saves against the baseline."""
    ratios = {
        codec: mean([rows[BASELINE].wire_bytes / rows[codec].wire_bytes for rows in tables])
        for codec in OURS
        if all(codec in rows for rows in tables)
    }
    best = max(ratios, key=lambda codec: ratios[codec])
    return {
        "wire_ratio": ratios[best],
        "wire_ratio_codec": best,
        **{f"{codec.lower()}_wire_ratio": ratio for codec, ratio in ratios.items()},
        "l1_decode_speed_ratio": mean(
            [rows[BASELINE].apply.cpu_s / rows[DEFAULT].apply.cpu_s for rows in tables]
        ),
        "l1_encode_speed_ratio": mean(
            [rows[BASELINE].encode.cpu_s / rows[DEFAULT].encode.cpu_s for rows in tables]
        ),
    }


def pause_figures(costs: Mapping[str, Cost]) -> dict[str, float]:
    """Our commit against the others'."""
    ours = costs["commit"]
    return {
        "commit_speedup_vs_vllm_sparse": costs["vLLM sparse loader"].cpu_s / ours.cpu_s,
        "commit_over_memcpy": ours.cpu_s / costs["memcpy of the model"].cpu_s,
        "commit_and_digest_check_over_memcpy": costs["prepare and commit"].cpu_s
        / costs["memcpy of the model"].cpu_s,
    }


def default_figures(rows: Rows) -> dict[str, float]:
    """What the default codec takes of memory on the side that takes more, and beside memcpy."""
    row = rows[DEFAULT]
    return {
        "extra_memory_pct": max(row.sender_memory_pct, row.receiver_memory_pct),
        "extra_memory_sender_pct": row.sender_memory_pct,
        "extra_memory_receiver_pct": row.receiver_memory_pct,
        "l1_encode_over_memcpy": row.encode_over_memcpy,
        "l1_apply_over_memcpy": row.apply_over_memcpy,
    }


def mean(values: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, values)) / len(values))
