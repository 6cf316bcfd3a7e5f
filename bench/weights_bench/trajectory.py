"""Two consecutive versions of a policy as raw words, kept in a cache folder."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from etude.common.weights.tensors.schema import Grid, Schema, TensorSpec, split_of
from etude.common.weights.tensors.words import Words, word_type

GRID: Grid = 8
"""The tile grid that runs use unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """An old and a new version, tensor by tensor in the order of the schema."""

    name: str
    schema: Schema
    old: tuple[Words, ...]
    new: tuple[Words, ...]
    facts: Mapping[str, object] = field(default_factory=dict)
    """How it was made, for the table."""

    @property
    def num_bytes(self) -> int:
        """Size of one version."""
        return self.schema.num_bytes

    @property
    def elements(self) -> int:
        """Numbers of one version."""
        return sum(words.size for words in self.old)

    @property
    def changed(self) -> int:
        """Numbers that differ."""
        pairs = zip(self.old, self.new, strict=True)
        return sum(int(np.count_nonzero(old != new)) for old, new in pairs)


def spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """A tensor as a trainer would describe it."""
    return TensorSpec(name=name, dtype=dtype, shape=shape, split=split_of(name))


def gathered(
    name: str,
    tensors: Mapping[str, tuple[TensorSpec, Words, Words]],
    facts: Mapping[str, object],
) -> Trajectory:
    """A trajectory of named tensors: their specification, old words, new words."""
    ordered = [tensors[key] for key in sorted(tensors)]
    return Trajectory(
        name=name,
        schema=Schema(grid=GRID, tensors=tuple(each for each, _, _ in ordered)),
        old=tuple(old for _, old, _ in ordered),
        new=tuple(new for _, _, new in ordered),
        facts=facts,
    )


def cached(folder: Path, key: str, make: Callable[[], Mapping[str, Trajectory]]) -> dict[str, Path]:
    """Files of the trajectories that `make` gives by name, made unless a former call kept them.

    Args:
        folder: the cache.
        key: names everything that the trajectories follow from.
        make: gives them.
    """
    home = folder / key
    done = home / "complete"
    if not done.is_file():
        home.mkdir(parents=True, exist_ok=True)
        for name, trajectory in make().items():
            _save(home / f"{name}.npz", trajectory)
        done.touch()
    return {path.stem: path for path in home.glob("*.npz")}


def _save(path: Path, trajectory: Trajectory) -> None:
    arrays = {
        f"{side}{place}": words
        for side, versions in (("old", trajectory.old), ("new", trajectory.new))
        for place, words in enumerate(versions)
    }
    texts = {
        "name": trajectory.name,
        "schema": trajectory.schema.model_dump_json(),
        "facts": json.dumps(dict(trajectory.facts)),
    }
    about = {key: np.frombuffer(text.encode(), np.uint8) for key, text in texts.items()}
    with path.open("wb") as file:
        np.savez(file, **arrays, **about)  # type: ignore[arg-type]  # its stub has allow_pickle in the way


def load(path: Path) -> Trajectory:
    """A trajectory from its file."""
    with np.load(path) as stored:
        schema = Schema.model_validate_json(bytes(stored["schema"]))
        sides = {
            side: tuple(
                stored[f"{side}{place}"].view(word_type(each.dtype))
                for place, each in enumerate(schema.tensors)
            )
            for side in ("old", "new")
        }
        return Trajectory(
            name=bytes(stored["name"]).decode(),
            schema=schema,
            old=sides["old"],
            new=sides["new"],
            facts=json.loads(bytes(stored["facts"])),
        )
