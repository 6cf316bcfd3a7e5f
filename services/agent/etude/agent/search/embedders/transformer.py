"""Transformer encoder in whole numbers, run by numpy.

    y = norm(x + place + kind);  x += output(attention(y))
    y = norm(x + place + kind);  x += outer(relu(inner(y)))
    v = Σ_w f(count(w)) · gate(w) · x(w)

Its words are a text's distinct words, each at its first place. Whatever is summed is whole: a
matrix product multiplies int8 by int8, and sums below 2^24 are exact in float32 in any order.
Between sums are only additions, products, divisions and square roots of single numbers, which every
IEEE 754 machine rounds alike; powers of two are read from a table. So a vector has the same bits
whatever the CPU, the library, the threads or the other texts of a batch.

Sources: Vaswani et al., https://arxiv.org/abs/1706.03762; Zhang, Sennrich, "Root Mean Square Layer
Normalization", https://arxiv.org/abs/1910.07467; integer inference as in Kim et al., "I-BERT",
https://arxiv.org/abs/2101.01321.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from etude.agent.search.embedders.interface import Bytes, quantise
from etude.agent.search.embedders.weights import HEADS, EncoderWeights, Floats, Linear
from etude.agent.search.tokens import COUNT_WEIGHTS, MAX_COUNT

CODE, QUESTION = 0, 1
MAX_GATE = 4
_GATE_STEPS = 64
_MAX_SUMMAND = 1 << 22
"""Limit of a component in a sum of words, in units: sums are exact in float64."""
_STEPS_PER_OCTAVE = 16
_POWERS = np.array(
    [round(255 * 2 ** (-step / _STEPS_PER_OCTAVE)) for step in range(9 * _STEPS_PER_OCTAVE)] + [0],
    np.float32,
)
"""Powers of two from 255 down to 0: weights of attention before they are divided by their sum."""
_FAR = np.float32(1 << 20)
_COUNT_WEIGHTS = np.array(COUNT_WEIGHTS, np.float64)


class _Map(NamedTuple):
    """A linear map as float32 has it; whole numbers but for the scales."""

    weights: Floats
    scales: Floats
    bias: Floats

    @classmethod
    def of(cls, linear: Linear) -> Self:
        return cls(
            np.ascontiguousarray(linear.weights.T.astype(np.float32)), linear.scales, linear.bias
        )

    def apply(self, rows: "_Rows") -> Floats:
        found: Floats = (rows.whole @ self.weights) * rows.scales * self.scales + self.bias
        return found


class _Rows(NamedTuple):
    """Rows of whole numbers up to 127, and the number that each is to be multiplied with."""

    whole: Floats
    scales: Floats


class _Layer(NamedTuple):
    attention: _Map
    output: _Map
    inner: _Map
    outer: _Map


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Weights, ready to compute with; build it with `of`."""

    weights: EncoderWeights
    gate: _Map
    layers: Sequence[_Layer]

    @classmethod
    def of(cls, weights: EncoderWeights) -> Self:
        """Prepare weights for computation."""
        layers = [_Layer(*map(_Map.of, layer)) for layer in weights.layers]
        return cls(weights=weights, gate=_Map.of(weights.gate), layers=layers)

    def encode(self, texts: Sequence[Mapping[int, int]], kind: int) -> Bytes:
        """Vectors of texts, each given as rows of words with their counts.  [B] -> [B, C]."""
        longest = max(map(len, texts), default=0)
        if not longest:
            return np.zeros((len(texts), self.weights.num_components), np.int8)
        ids = np.array([[*text, *[0] * (longest - len(text))] for text in texts])
        counts = np.array([[*text.values(), *[0] * (longest - len(text))] for text in texts])
        present = (counts > 0)[:, :, None].astype(np.float32)
        scales = self.weights.scales[ids].astype(np.float32)[:, :, None]
        x = self.weights.rows[ids].astype(np.float32) * scales * self.weights.unit
        where = self.weights.places[:longest] + self.weights.kinds[kind]
        for layer in self.layers:
            y = layer.attention.apply(_normalise(x + where))
            x = x + layer.output.apply(_scale(_attend(y, present)))
            y = layer.inner.apply(_normalise(x + where))
            x = x + layer.outer.apply(_scale(np.maximum(y, np.float32(0))))
        gates = np.clip(self.gate.apply(_normalise(x + where)) + np.float32(1), 0, MAX_GATE)
        return self._sum(x, np.rint(gates[:, :, 0] * _GATE_STEPS), counts)

    def _sum(self, x: Floats, gates: Floats, counts: NDArray[np.int64]) -> Bytes:
        units = np.rint(x / self.weights.unit).astype(np.float64)
        units = np.clip(units, -_MAX_SUMMAND, _MAX_SUMMAND)
        factors = _COUNT_WEIGHTS[np.minimum(counts, MAX_COUNT)] * gates
        return quantise((factors[:, None, :] @ units)[:, 0, :])


def _steps(largest: Floats) -> Floats:
    """Sizes of steps of which the largest number is 127."""
    some: Floats = np.where(largest > 0, largest, np.float32(1)).astype(np.float32)
    steps: Floats = (some / np.float32(127)).astype(np.float32)
    return steps


def _scale(x: Floats) -> _Rows:
    """The nearest whole numbers.  [..., C]."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    steps = _steps(largest)
    return _Rows(np.rint(x / steps), steps)


def _normalise(x: Floats) -> _Rows:
    """The nearest whole numbers, scaled to a mean square of 1.  [..., C]."""
    whole = _scale(x).whole
    squares: Floats = np.einsum("...c,...c->...", whole, whole)[..., None]
    factors: Floats = np.sqrt(np.float32(x.shape[-1]) / np.maximum(squares, np.float32(1)))
    return _Rows(whole, factors)


def _attend(y: Floats, present: Floats) -> Floats:
    """Attention of every word to all present ones.  [B, L, 3 C], [B, L, 1] -> [B, L, C]."""
    batch, length, width = y.shape
    split = y.reshape(batch, length, 3, HEADS, width // 3 // HEADS).transpose(2, 0, 3, 1, 4)
    query, key = _scale(split[0]), _scale(split[1])
    value = split[2] * present[:, None]
    largest = np.abs(value).max(axis=(2, 3), keepdims=True)
    steps = _steps(largest)
    octave = _STEPS_PER_OCTAVE / math.log(2) / math.sqrt(split.shape[-1])
    scores = (query.whole @ key.whole.swapaxes(2, 3)) * (query.scales * np.float32(octave))
    scores = np.rint(scores * key.scales.swapaxes(2, 3)) - (1 - present[:, None, None, :, 0]) * _FAR
    below = np.minimum(scores.max(axis=-1, keepdims=True) - scores, np.float32(len(_POWERS) - 1))
    shares = _POWERS[below.astype(np.int32)]
    found = (shares @ np.rint(value / steps)) * steps / shares.sum(axis=-1, keepdims=True)
    rows: Floats = found.transpose(0, 2, 1, 3).reshape(batch, length, width // 3)
    return rows
