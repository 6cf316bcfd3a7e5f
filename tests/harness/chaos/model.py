"""The trained model of the chaos run, and the oracle of its bits: numpy alone, none of our code."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Kind = Literal["step", "dense", "same"]
Bits = dict[str, npt.NDArray[np.unsignedinteger]]
"""Raw words of every tensor, flat, in checkpoint order."""

DENSITIES = (1e-4, 0.3)
"""Share of the elements that a step changes, about."""
ULP_OF_A_WEIGHT = 1e-4
"""Distance of bf16 neighbours at the size of the weights."""


class Tensor(NamedTuple):
    """One tensor of the checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    split: Literal["rows", "columns"] = "rows"


TENSORS: dict[str, Tensor] = {
    "embed.weight": Tensor("BF16", (4096, 128)),
    "layers.0.bias": Tensor("F32", (1024,)),
    "layers.0.down_proj.weight": Tensor("BF16", (256, 1024), "columns"),
    "layers.0.experts.w1.weight": Tensor("BF16", (4, 256, 256)),
    "layers.0.experts.w2.weight": Tensor("BF16", (4, 256, 128), "columns"),
    "layers.0.gate.weight": Tensor("BF16", (1024, 256)),
    "layers.0.k_proj.weight": Tensor("BF16", (128, 256)),
    "layers.0.norm.weight": Tensor("BF16", (256,)),
    "layers.0.o_proj.weight": Tensor("BF16", (256, 256), "columns"),
    "layers.0.q_proj.weight": Tensor("BF16", (256, 256)),
    "layers.0.v_proj.weight": Tensor("BF16", (128, 256)),
    "layers.1.odd.weight": Tensor("BF16", (331, 257)),
    "layers.1.up.scale": Tensor("U8", (512, 4)),
    "layers.1.up.weight": Tensor("F8_E4M3", (512, 512)),
}
"""Sorted by name, as the checkpoint's bytes are; the embedding is tied to the output head."""

_CODES = ("layers.1.up.scale", "layers.1.up.weight")
_FLOATS = [name for name in TENSORS if name not in _CODES]
_SIZES = {name: int(np.prod(tensor.shape)) for name, tensor in TENSORS.items()}
_TOTAL = sum(_SIZES[name] for name in _FLOATS)


def sha256(bits: Bits) -> str:
    """SHA-256 of the full bytes in checkpoint order, hexadecimal."""
    found = hashlib.sha256()
    for name in TENSORS:
        found.update(np.ascontiguousarray(bits[name]).view(np.uint8).data)
    return found.hexdigest()


@dataclass(slots=True)
class Trainer:
    """Full-precision masters that momentum steps move; the same step gives the same bits."""

    seed: int
    branch: int = 0
    """Rises where a run goes another way than before."""
    step: int = 0
    master: npt.NDArray[np.float32] = field(init=False)
    moment: npt.NDArray[np.float32] = field(init=False)
    codes: Bits = field(init=False)
    _bank: npt.NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        drawn = np.random.default_rng(self.seed)
        self._bank = drawn.standard_normal(_TOTAL + (1 << 20), np.float32)
        self.moment = np.zeros(_TOTAL, np.float32)
        self._redraw(drawn)

    def train(self, kind: Kind) -> None:
        """Take one step; a dense one draws all weights anew."""
        self.step += 1
        drawn = np.random.default_rng([self.seed, self.branch, self.step])
        if kind == "dense":
            self._redraw(drawn)
        elif kind == "step":
            self._move(drawn)

    def bits(self) -> Bits:
        """The weights as they are published."""
        found: Bits = {}
        start = 0
        for name in _FLOATS:
            some = self.master[start : start + _SIZES[name]].view(np.uint32)
            start += _SIZES[name]
            found[name] = some.copy() if TENSORS[name].dtype == "F32" else _to_bf16(some)
        return found | {name: codes.copy() for name, codes in self.codes.items()}

    def save(self, path: Path) -> None:
        """Write everything that a resumed trainer needs."""
        place = np.array([self.branch, self.step])
        codes = {f"code{i}": self.codes[name] for i, name in enumerate(_CODES)}
        with path.open("wb") as file:
            np.savez(file, master=self.master, moment=self.moment, place=place, **codes)  # type: ignore[arg-type] # arrays by name

    def load(self, path: Path) -> None:
        """Go on from what was saved."""
        with np.load(path) as saved:
            self.master, self.moment = saved["master"], saved["moment"]
            self.branch, self.step = (int(each) for each in saved["place"])
            self.codes = {name: saved[f"code{i}"] for i, name in enumerate(_CODES)}

    def _redraw(self, drawn: np.random.Generator) -> None:
        self.master = drawn.standard_normal(_TOTAL, np.float32) * np.float32(0.02)
        self.codes = {name: drawn.integers(0, 256, _SIZES[name], np.uint8) for name in _CODES}

    def _move(self, drawn: np.random.Generator) -> None:
        density = float(np.exp(drawn.uniform(*np.log(DENSITIES))))
        at = int(drawn.integers(0, self._bank.size - _TOTAL))
        self.moment *= np.float32(0.9)
        self.moment += np.float32(0.1) * self._bank[at : at + _TOTAL]
        self.master -= np.float32(density * ULP_OF_A_WEIGHT / 0.23) * self.moment
        for codes in self.codes.values():
            places = drawn.integers(0, codes.size, 1 + int(density * codes.size))
            codes[places] += drawn.choice(np.array([1, 255], np.uint8), places.size)


def _to_bf16(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """To the nearest, ties to even; the weights are finite."""
    return ((words + np.uint32(0x7FFF) + ((words >> 16) & 1)) >> 16).astype(np.uint16)
