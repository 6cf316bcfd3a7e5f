"""Four ranks that divide experts (FSDP 2 x expert 2) against one rank that has all of them."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.trainer.expert_ranks import CASES, compare_all, save_models
from tests.support.trainer.rank_processes import run_ranks

CASE = "FSDP"


def compare_ranks() -> dict[str, float]:
    """Largest differences of three steps of a tiny Qwen3-MoE, and what they took."""
    began = time.monotonic()
    with TemporaryDirectory(prefix="etude-moe-") as name:
        folder = Path(name)
        save_models(folder, [CASE])
        found = run_ranks(compare_all, folder, [CASE], size=CASES[CASE].ranks)[CASE]
    return {
        "grad_diff_ep": found["gradients"],
        "norm_diff_ep": found["norm"],
        "loss_diff_ep": found["loss"],
        "weight_diff_ep": found["weights"],
        "ep_seconds": time.monotonic() - began,
        "ep_cpu_seconds": found["cpu_seconds"],
    }
