"""One side of the comparison: a process that makes a step for each line that it reads."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch

MATMULS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")
ATTENTION = "scaled_dot_product"
"""Part of the names of all attention operators."""


class Order(NamedTuple):
    """A step to make."""

    step: int
    is_profiled: bool


@dataclass(slots=True)
class Usage:
    """Time that a part of a step took."""

    cpu_s: float = 0.0
    """Of all threads of the process."""
    wall_s: float = 0.0
    tokens: int = 0

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of the block."""
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        yield
        self.cpu_s += time.process_time() - cpu_s
        self.wall_s += time.perf_counter() - wall_s


@dataclass(slots=True)
class StepReport:
    """What a step took."""

    rollout: Usage = field(default_factory=Usage)
    """Tokens: those sampled."""
    train: Usage = field(default_factory=Usage)
    """Tokens: prompts and completions of the batch, padding left out."""
    operators: dict[str, float] = field(default_factory=dict)
    """Seconds of each operator in the training part without those inside; empty unless profiled."""


class Orders:
    """Orders on standard input, and the answers to them."""

    def __init__(self) -> None:
        # Libraries print; the answers keep standard output for themselves.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def report_ready(self) -> None:
        """Tell that the model is loaded."""
        self._write({})

    def take(self) -> Order | None:
        """Wait for the next order; None at the end."""
        line = sys.stdin.readline()
        return Order(**json.loads(line)) if line else None

    def answer(self, report: StepReport) -> None:
        """Answer the order that was taken last."""
        self._write(asdict(report))

    def _write(self, message: object) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


@contextlib.contextmanager
def profile_operators(report: StepReport, *, enabled: bool) -> Iterator[None]:
    """Record the seconds of each operator in the block."""
    if not enabled:
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    for event in profile.key_averages():
        report.operators[event.key] = event.self_cpu_time_total / 1e6


def pin_threads(threads: int) -> None:
    """Run on as many cores as threads; to be called before torch starts any."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    torch.set_num_threads(threads)
