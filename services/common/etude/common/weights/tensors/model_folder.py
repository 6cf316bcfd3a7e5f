"""Hugging Face model folders: a version's weights in files, everything else from a source."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from etude.common.errors import Problem, UserError
from etude.common.stores import WEIGHT_SUFFIXES
from etude.common.weights.tensors import safetensors
from etude.common.weights.tensors.safetensors import Tensor
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.words import Words

PART_BYTES = 2 << 30
"""Size of one file of weights; Hugging Face's readers take any."""

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def weight_files(
    tensors: Iterable[Tensor], sizes: Sequence[int], *, part_bytes: int = PART_BYTES
) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file of weights: one, or several and their index.

    Args:
        tensors: taken as the files are; those of one file are in memory.
        sizes: bytes of each.
        part_bytes: that a file does not exceed, unless one tensor does.
    """
    counts = _tensors_per_part(sizes, part_bytes)
    waiting = iter(tensors)
    if len(counts) == 1:
        yield "model.safetensors", safetensors.encode(list(waiting))
        return
    where: dict[str, str] = {}
    for place, count in enumerate(counts, start=1):
        name = f"model-{place:05d}-of-{len(counts):05d}.safetensors"
        part = list(itertools.islice(waiting, count))
        where |= dict.fromkeys((tensor.name for tensor in part), name)
        yield name, safetensors.encode(part)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
    yield "model.safetensors.index.json", json.dumps(index, indent=2).encode()


def _tensors_per_part(sizes: Sequence[int], part_bytes: int) -> list[int]:
    """Number of tensors in each part, in their order."""
    counts, filled = [0], 0
    for size in sizes:
        if counts[-1] and filled + size > part_bytes:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return counts


def tensors_of(schema: Schema, words: Mapping[str, Words]) -> Iterator[Tensor]:
    """The words of a version as named tensors, in the order of the schema."""
    for spec in schema.tensors:
        data = words[spec.name].view(np.uint8).data if spec.elements else b""
        yield Tensor(name=spec.name, dtype=spec.dtype, shape=spec.shape, data=data)


def config_of(source: Path, schema: Schema) -> bytes:
    """The source's config.json, in the number format of the schema's largest tensor.

    Raises:
        UserError: it cannot be read.
    """
    try:
        config = json.loads((source / "config.json").read_bytes())
        config.pop("torch_dtype", None)
    except (OSError, ValueError, AttributeError) as cause:
        raise UserError(
            Problem(
                reason="InvalidModel",
                what=f"cannot be read: {cause}",
                where=f"{source}/config.json",
                fix="name the model folder that the run started from",
            )
        ) from cause
    widest = max(schema.tensors, key=lambda spec: spec.elements)
    if widest.dtype in _DTYPES:
        config["dtype"] = _DTYPES[widest.dtype]
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def other_files(source: Path) -> Iterator[Path]:
    """Files of a folder besides weights and config.json: the tokenizer, templates, a licence."""
    for path in sorted(source.iterdir()):
        is_other = path.name != "config.json" and not path.name.endswith(WEIGHT_SUFFIXES)
        if path.is_file() and is_other:
            yield path


def write_folder(
    folder: Path, *, schema: Schema, words: Mapping[str, Words], source: Path
) -> list[Path]:
    """Write a model folder that any Hugging Face reader loads; what was written.

    Args:
        folder: new or empty.
        schema: of the words.
        words: of every tensor.
        source: the model folder that the run started from.

    Raises:
        UserError: the source is no model folder, or the folder is not empty.
    """
    config = config_of(source, schema)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(
            Problem("Conflict", "is not empty", str(folder), "name a folder that is new or empty")
        )
    files = []
    sizes = [spec.num_bytes for spec in schema.tensors]
    for name, data in weight_files(tensors_of(schema, words), sizes):
        files.append(folder / name)
        files[-1].write_bytes(data)
    for path in other_files(source):
        files.append(folder / path.name)
        files[-1].write_bytes(path.read_bytes())
    files.append(folder / "config.json")  # last: without it the folder is no model
    files[-1].write_bytes(config)
    return files
