"""Trajectory A: 100.7 M bf16 parameters under Adam with synthetic gradients.

Weights are N·exp(0.25 N)·0.02·exp(0.3 N_row)·exp(0.3 N_col), norms 1 + 0.2 N, rounded to bf16; the
fp32 master then lies anywhere in its rounding cell, as in the middle of a run. A gradient is
(noise + 0.15·signal)·1e-5·exp(0.7 N_row)·exp(0.7 N_col); the signal turns every 4 steps, and 15 %
of the embedding's rows get a gradient in a step. 20 steps of Adam move the moments only; the next
one moves the weights, once for each learning rate.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors.schema import TensorSpec
from etude.common.weights.tensors.words import Words
from weights_bench.recipes import Synthetic
from weights_bench.trajectory import Trajectory, gathered, spec

Floats = npt.NDArray[np.float32]

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8
WARM_STEPS = 20
"""Steps that move the moments only."""
CHUNK = 1 << 22
"""Elements whose state is in memory at once."""


def trajectories(shape: Synthetic, rates: Sequence[float], *, seed: int) -> dict[str, Trajectory]:
    """One trajectory for each learning rate; all leave from the same version."""
    made: dict[float, dict[str, tuple[TensorSpec, Words, Words]]] = {rate: {} for rate in rates}
    for name, size in shape.tensors():
        old, new = _tensor(name, size, rates, seed)
        for rate in rates:
            made[rate][name] = (spec(name, "BF16", size), old, new[rate])
    return {
        f"A-{rate:.0e}": gathered(
            f"A {rate:.0e}",
            made[rate],
            {"learning_rate": rate, "seed": seed, "dither": True},
        )
        for rate in rates
    }


class _Band(NamedTuple):
    """Some rows of a tensor, and what scales them."""

    rows: int
    columns: int
    weight_scale: Floats
    gradient_scale: Floats
    is_embedding: bool


def _tensor(
    name: str, size: tuple[int, ...], rates: Sequence[float], seed: int
) -> tuple[Words, Mapping[float, Words]]:
    """A tensor's old words, and its new ones by learning rate."""
    rows, columns = size if len(size) == 2 else (size[0], 1)
    # SeedSequence mixes what it is given: each tensor has a stream of its own.
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    by_column = {part: rng.standard_normal(columns, np.float32) for part in (0.3, 0.7)}
    old = np.empty(rows * columns, np.uint16)
    new = {rate: np.empty(rows * columns, np.uint16) for rate in rates}
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        scale = {
            part: np.exp(part * rng.standard_normal((count, 1), np.float32))
            * np.exp(np.float32(part) * by_column[part])
            for part in by_column
        }
        band = _Band(count, columns, scale[0.3], scale[0.7], "embed" in name)
        place = slice(start * columns, (start + count) * columns)
        weights = 1 + 0.2 * rng.standard_normal((count, 1), np.float32)
        if len(size) == 2:
            weights = _matrix(rng, band)
        old[place] = _bf16(weights).ravel()
        master = _dithered(rng, old[place]).reshape(count, columns)
        direction = _direction(rng, band)
        for rate in rates:
            new[rate][place] = _bf16(master - np.float32(rate) * direction).ravel()
    return old, new


def _matrix(rng: np.random.Generator, band: _Band) -> Floats:
    size = (band.rows, band.columns)
    weights = rng.standard_normal(size, np.float32)
    weights *= np.exp(np.float32(0.25) * rng.standard_normal(size, np.float32))
    return weights * np.float32(0.02) * band.weight_scale


def _direction(rng: np.random.Generator, band: _Band) -> Floats:
    """Where Adam goes after the warm steps, for a learning rate of 1."""
    size = (band.rows, band.columns)
    signal = rng.standard_normal(size, np.float32)
    first, second = np.zeros(size, np.float32), np.zeros(size, np.float32)
    for step in range(WARM_STEPS + 1):
        if step and step % 4 == 0:
            signal *= np.float32(0.98)
            signal += np.float32(0.2) * rng.standard_normal(size, np.float32)
        gradient = rng.standard_normal(size, np.float32)
        gradient += np.float32(0.15) * signal
        gradient *= band.gradient_scale * np.float32(1e-5)
        if band.is_embedding:
            gradient *= rng.random((band.rows, 1)) < 0.15
        first += np.float32(1 - BETA1) * (gradient - first)
        gradient *= gradient
        second += np.float32(1 - BETA2) * (gradient - second)
    first /= np.float32(1 - BETA1 ** (WARM_STEPS + 1))
    second /= np.float32(1 - BETA2 ** (WARM_STEPS + 1))
    first /= np.sqrt(second) + np.float32(EPSILON)
    return first


def _bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """Words of the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _dithered(rng: np.random.Generator, words: npt.NDArray[np.uint16]) -> Floats:
    """Numbers that round to these bf16 words, anywhere in their rounding cells."""
    low = np.where(words & 0x7FFF, -0x7FFF, 0)
    bits = (words.astype(np.int64) << 16) + rng.integers(low, 0x8000)
    return bits.astype(np.uint32).view(np.float32)
