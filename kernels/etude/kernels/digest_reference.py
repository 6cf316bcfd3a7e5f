"""Reference of the state digest: its formula in plain torch, also used for CPU tensors.

H_j = sum over lanes i of mix_j(i, w_i) mod 2^64 for j in {0, 1}, where w_i are 16 raw bits at
global lane i: z = s_j + i*0x9E3779B97F4A7C15 + w*0xD1B54A32D192ED03; z ^= z >> 30;
z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31, with s_0 = 0 and
s_1 = 0xA5A5A5A5A5A5A5A5 (the finaliser of SplitMix64, https://prng.di.unimi.it/splitmix64.c).
An element of 8 bits is one lane; one of 32 bits is two, its low half first.
It proves bookkeeping, not origin: it is not a cryptographic hash.
"""

import torch
from torch import Tensor

from etude.kernels.raw_words import lanes_per_element, widen

SEEDS = (0, 0xA5A5A5A5A5A5A5A5)
LANE_FACTOR = 0x9E3779B97F4A7C15
WORD_FACTOR = 0xD1B54A32D192ED03
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
PIECE = 1 << 18
"""Elements that the reference widens at once."""


def digest_scan(raw: Tensor, *, first_lane: int) -> Tensor:
    """Digest of contiguous words; torch's int64 wraps.  [n] -> [2]."""
    step = lanes_per_element(8 * raw.itemsize)
    total = torch.zeros(2, dtype=torch.int64, device=raw.device)
    for start in range(0, raw.numel(), PIECE):
        piece = raw[start : start + PIECE]
        places = torch.arange(start, start + piece.numel(), device=raw.device)
        total += element_sums(widen(piece), first_lane + places * step, lanes=step)
    return total


def element_sums(numbers: Tensor, lane: Tensor, *, lanes: int) -> Tensor:
    """Digest of elements given as numbers, each with its first lane.  [k], [k] -> [2]."""
    total = torch.zeros(2, dtype=torch.int64, device=numbers.device)
    for part in range(lanes):
        half = (numbers >> (16 * part)) & 0xFFFF
        total += torch.stack([_mix(lane + part, half, seed).sum() for seed in SEEDS])
    return total


def _mix(lane: Tensor, word: Tensor, seed: int) -> Tensor:
    z = _wrap(seed) + lane * _wrap(LANE_FACTOR) + word * _wrap(WORD_FACTOR)
    z = (z ^ _shift_right(z, 30)) * _wrap(MULTIPLIERS[0])
    z = (z ^ _shift_right(z, 27)) * _wrap(MULTIPLIERS[1])
    return z ^ _shift_right(z, 31)


def _wrap(number: int) -> int:
    """The int64 with these 64 bits."""
    return number - (1 << 64) if number >> 63 else number


def _shift_right(z: Tensor, places: int) -> Tensor:
    """Right shift that fills with zeros; torch's fills with the sign."""
    return (z >> places) & ((1 << (64 - places)) - 1)
