"""Cases that algorithms and other code bases compute the same gradient of.

Shapes: B rollouts, T tokens of the longest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """An algorithm with parameters, as a phase would give them."""

    algorithm: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_corrected: bool = False
    """True if proximal and sampler log-probs differ."""
    is_first_update: bool = False
    """True if the trainer's log-probs are the proximal ones in value."""


FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        "DrGRPO": Formula(algorithm="DrGRPO"),
        "GRPO": Formula(algorithm="GRPO"),
        "RLOO": Formula(algorithm="RLOO"),
        "PPO": Formula(algorithm="PPO"),
        "DAPO": Formula(algorithm="DAPO"),
        "GSPO": Formula(algorithm="GSPO", parameters={"clipLow": 0.05, "clipHigh": 0.08}),
        "CISPO": Formula(algorithm="CISPO"),
        "DPPO": Formula(algorithm="DPPO", parameters={"divergence": 0.1}),
        "SAPO": Formula(algorithm="SAPO"),
        "DecoupledPPO": Formula(algorithm="DecoupledPPO", is_corrected=True),
        "TIS": Formula(
            algorithm="PPO",
            parameters={"correction": {"kind": "TIS", "high": 1.05}},
            is_corrected=True,
        ),
        "IcePop": Formula(
            algorithm="PPO",
            parameters={"correction": {"kind": "IcePop", "low": 0.95, "high": 1.05}},
            is_corrected=True,
        ),
        "SequenceMaskTIS": Formula(
            algorithm="PPO",
            parameters={"correction": {"kind": "SequenceMaskTIS", "low": 0.97, "high": 1.03}},
            is_corrected=True,
        ),
        "OPSM": Formula(algorithm="PPO", parameters={"opsmDelta": 0.02}, is_first_update=True),
        "logRatioPenalty": Formula(algorithm="PPO", parameters={"logRatioPenalty": 0.1}),
    }
)
"""What is compared, by its name in the table."""


class Case(NamedTuple):
    """One batch of log-probs."""

    logprobs: Tensor
    """Of the trainer. [B, T]"""
    proximal: Tensor
    """[B, T]"""
    sampler: Tensor
    """[B, T]"""
    mask: Tensor
    """True for trained tokens. [B, T]"""
    advantages: Tensor
    """Given, where there are no rewards. [B]"""
    rewards: Tensor | None = None
    """[B]"""
    groups: Tensor | None = None
    """Group number of each rollout. [B]"""

    @property
    def has_short_row(self) -> bool:
        """True if a rollout has a single trained token."""
        return bool((self.mask.sum(1) == 1).any())

    def as_json(self) -> dict[str, Any]:
        """As lists; numbers are exact in JSON."""
        values = self._asdict()
        return {name: None if v is None else v.tolist() for name, v in values.items()}


def fixed_case() -> Case:
    """Four rollouts of up to seven tokens, with given advantages."""
    generator = torch.Generator().manual_seed(0)
    proximal, logprobs, sampler = _draw_logprobs(generator, 4, 7)
    advantages = _normal(generator, 4)
    mask = torch.arange(7) < torch.tensor([7, 5, 3, 6])[:, None]
    mask[1, 2] = False
    mask[3, :2] = False
    return Case(logprobs, proximal, sampler, mask, advantages)


def draw_cases(*, count: int, seed: int) -> Iterator[Case]:
    """Draw cases of random shapes: groups of two to four, rows with holes, rows without tokens."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    for _ in range(count):
        group, groups, length = integer(2, 4), integer(1, 3), integer(1, 12)
        rollouts = group * groups
        proximal, logprobs, sampler = _draw_logprobs(generator, rollouts, length)
        mask = torch.rand(rollouts, length, generator=generator) < 0.7
        mask[0, 0] = True
        if integer(0, 2) == 0:
            mask[-1] = False
        yield Case(
            logprobs,
            proximal,
            sampler,
            mask,
            torch.zeros(rollouts, dtype=torch.float64),
            _normal(generator, rollouts),
            torch.arange(groups).repeat_interleave(group),
        )


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _draw_logprobs(
    generator: torch.Generator, rollouts: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Proximal, trainer and sampler log-probs. [B, T] each."""
    proximal = -_normal(generator, rollouts, length).abs() - 0.05
    logprobs = (proximal + 0.25 * _normal(generator, rollouts, length)).clamp(max=-1e-3)
    sampler = (proximal + 0.1 * _normal(generator, rollouts, length)).clamp(max=-1e-3)
    return proximal, logprobs, sampler
