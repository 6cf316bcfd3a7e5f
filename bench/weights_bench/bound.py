"""The fewest bits per change that a coder needs who knows the class of each old value.

The bound is [Σ_c n_c·H(k_c / n_c) + Σ_c k_c·H(d | c)] / Σ k_c: which elements of a class change,
and by how many steps d on the ulp axis; the class c is the exponent of the old value.
"""

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors.schema import TensorSpec
from etude.common.weights.tensors.words import Words
from weights_bench.trajectory import Trajectory

_MANTISSA = {"BF16": (7, 8), "F16": (10, 5), "F32": (23, 8), "F8_E4M3": (3, 4)}
"""Bits of the mantissa and of the exponent."""
_CLASSES = 256


def bits_per_change(trajectory: Trajectory) -> float:
    """The bound over all tensors together; 0 if nothing changed."""
    sizes, changed = np.zeros(_CLASSES), np.zeros(_CLASSES)
    moves: dict[tuple[int, int], int] = {}
    for spec, old, new in zip(
        trajectory.schema.tensors, trajectory.old, trajectory.new, strict=True
    ):
        classes = _classes(spec, old)
        places = np.flatnonzero(old != new)
        sizes += np.bincount(classes, minlength=_CLASSES)
        changed += np.bincount(classes[places], minlength=_CLASSES)
        step = _key(new[places]) - _key(old[places])
        pairs, counts = np.unique(
            np.stack([classes[places].astype(np.int64), step]), axis=1, return_counts=True
        )
        for kind, move, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
            moves[kind, move] = moves.get((kind, move), 0) + count
    total = changed.sum()
    if not total:
        return 0.0
    where = float((sizes * _entropy(changed / np.maximum(sizes, 1))).sum())
    what = -sum(n * np.log2(n / changed[kind]) for (kind, _), n in moves.items())
    return float((where + what) / total)


def _classes(spec: TensorSpec, words: Words) -> npt.NDArray[np.integer]:
    if spec.dtype not in _MANTISSA:
        return np.zeros(words.size, np.uint8)
    mantissa, exponent = _MANTISSA[spec.dtype]
    return ((words >> mantissa) & ((1 << exponent) - 1)).astype(np.uint8)


def _key(words: Words) -> npt.NDArray[np.int64]:
    """Place on the ulp axis, by Python's own integers."""
    top = 1 << (8 * words.itemsize - 1)
    wide = words.astype(np.int64)
    return np.where(wide < top, wide ^ top, 2 * top - 1 - wide)


def _entropy(share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of a coin, in bits."""
    share = np.clip(share, 1e-300, 1 - 1e-16)
    return np.asarray(-share * np.log2(share) - (1 - share) * np.log2(1 - share))
