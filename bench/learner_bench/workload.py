"""Workload of the comparison: prompts, lengths of completions and rewards of each step.

Completions are log-normal in length, as those of agents are: a few are many times the median.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
from tokenizers import Tokenizer

PROMPTS, SIBLINGS = 2, 8
PROMPT_TOKENS = (128, 256)
MEDIAN_TOKENS, SPREAD, LEAST_TOKENS, MOST_TOKENS = 160, 0.8, 16, 480
MODEL_LENGTH = 768
"""Most tokens of a prompt with its completion."""

STATED = (
    f"{PROMPTS} prompts of {PROMPT_TOKENS[0]} to {PROMPT_TOKENS[1]} tokens, {SIBLINGS} completions"
    f" of each, log-normal in length: median {MEDIAN_TOKENS}, sigma {SPREAD},"
    f" cut to {LEAST_TOKENS} to {MOST_TOKENS}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """One step. R = PROMPTS * SIBLINGS rollouts, siblings one behind the other."""

    prompts: list[str]
    lengths: list[int]
    """Tokens of each completion. [R]"""
    rewards: list[float]
    """[R]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What both sides do."""

    model: str
    """Model folder."""
    threads: int
    steps: list[StepLoad]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what write() wrote."""
        fields = json.loads(path.read_text())
        return cls(**fields | {"steps": [StepLoad(**each) for each in fields["steps"]]})

    def write(self, path: Path) -> None:
        """Write it for the processes of both sides."""
        path.write_text(json.dumps(asdict(self)))


def draw_steps(model: Path, *, steps: int, seed: int, spread: float = SPREAD) -> list[StepLoad]:
    """Draw steps; prompts are pieces of Python source, none of which occurs twice.

    Args:
        model: folder with tokenizer.json.
        steps: number of steps.
        seed: of all draws.
        spread: standard deviation of the logarithm of completion lengths.
    """
    rng = np.random.default_rng(seed)
    text = Path(argparse.__file__).read_text("utf-8")
    offsets = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).offsets
    drawn, place = [], 0
    for _ in range(steps):
        prompts = []
        for size in rng.integers(*PROMPT_TOKENS, PROMPTS):
            prompts.append(text[offsets[place][0] : offsets[place + size][0]])
            place += int(size)
        tokens = MEDIAN_TOKENS * np.exp(spread * rng.standard_normal(PROMPTS * SIBLINGS))
        drawn.append(
            StepLoad(
                prompts=prompts,
                lengths=[int(each) for each in tokens.clip(LEAST_TOKENS, MOST_TOKENS)],
                rewards=[float(each) for each in rng.random(PROMPTS * SIBLINGS)],
            )
        )
    return drawn
