"""Copies of a model's folder with a head of multi-token prediction that is still to be trained."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from pydantic import JsonValue

from etude.common.errors import CorruptError, Problem, UserError
from etude.common.weights.tensors import safetensors
from etude.common.weights.tensors.safetensors import StoredTensor, Tensor

ARCHITECTURE = "MiMoForCausalLM"
"""Name by which vLLM loads a Qwen2 model with a head."""
PREFIX = "model.mtp_layers.0."
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BASE_FILE, HEAD_FILE = "model-base.safetensors", "model-mtp.safetensors"
_ONES = {"F32": b"\x00\x00\x80\x3f", "BF16": b"\x80\x3f", "F16": b"\x00\x3c"}
"""The number 1 in formats of weights."""
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")


class HeadRefusedError(UserError):
    """The model can have no head, or the folder takes none."""

    reason = "InvalidModel"

    def __init__(self, where: Path, what: str, fix: str) -> None:
        super().__init__(Problem(reason=self.reason, what=what, where=str(where), fix=fix))


def add_mtp_head(source: Path, folder: Path) -> list[str]:
    """Write a copy of a model's folder with a head, which starts as a copy of the last block.

    Args:
        source: a folder of a Qwen2 model with safetensors.
        folder: new or empty.

    Returns:
        Names of the head's tensors.

    Raises:
        CorruptError: a file of weights is damaged.
        HeadRefusedError: the model can have no head, or has one, or the folder is not empty.
    """
    config = _read_config(source)
    files = _list_files(source)
    head = list(_head_tensors(source, files, config))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise HeadRefusedError(folder, "is not empty", "name a folder that is new or empty")
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in {"config.json", INDEX}:
            shutil.copyfile(path, folder / (BASE_FILE if path.name == SINGLE else path.name))
    (folder / HEAD_FILE).write_bytes(safetensors.encode(head))
    where = {
        stored.name: BASE_FILE if name == SINGLE else name
        for name, tensors in files.items()
        for stored in tensors
    } | {tensor.name: HEAD_FILE for tensor in head}
    total = sum(t.num_bytes for each in files.values() for t in each)
    total += sum(tensor.num_bytes for tensor in head)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    changed = dict(config) | {"architectures": [ARCHITECTURE], "num_nextn_predict_layers": 1}
    # Last: without it the folder is no model.
    (folder / "config.json").write_text(json.dumps(changed, indent=2, sort_keys=True) + "\n")
    return [tensor.name for tensor in head]


def _read_config(source: Path) -> Mapping[str, JsonValue]:
    """Configuration of a model that can have a head.

    Raises:
        HeadRefusedError: it cannot.
    """
    path = source / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as cause:
        raise HeadRefusedError(path, f"cannot be read: {cause}", "name a model's folder") from cause
    if not isinstance(config, dict) or config.get("model_type") != "qwen2":
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise HeadRefusedError(
            path, f"is of a model of type {kind}", "name a qwen2 model: engines run no other head"
        )
    if config.get("use_sliding_window"):
        raise HeadRefusedError(path, "has use_sliding_window: true", "name a model without windows")
    if config.get("num_nextn_predict_layers"):
        raise HeadRefusedError(path, "has a head already", "use the folder as it is")
    return config


def _list_files(source: Path) -> dict[str, list[StoredTensor]]:
    """Tensors of each file of weights.

    Raises:
        CorruptError: a file is damaged.
        HeadRefusedError: there is none.
    """
    names = sorted(path.name for path in source.glob("*.safetensors"))
    if not names:
        raise HeadRefusedError(source, "has no safetensors", "give a folder with weights")
    if SINGLE in names:
        names = [SINGLE]
    return {name: _list_tensors(source / name) for name in names}


def _list_tensors(path: Path) -> list[StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = safetensors.header_bytes(file.read(8), where=str(path))
        file.seek(0)
        header = file.read(length)
    return safetensors.list_tensors(header, size, where=str(path))


def _head_tensors(
    source: Path, files: Mapping[str, list[StoredTensor]], config: Mapping[str, JsonValue]
) -> Iterator[Tensor]:
    """Tensors of a head: the last block, and a sum of its two inputs in front of it.

    Raises:
        CorruptError: a block is missing.
        HeadRefusedError: the configuration lacks sizes.
    """
    size, last = config.get("hidden_size"), config.get("num_hidden_layers")
    if type(size) is not int or type(last) is not int:
        raise HeadRefusedError(source / "config.json", "lacks sizes", "give hidden_size and layers")
    found = False
    for name, tensors in files.items():
        for stored in tensors:
            match = _BLOCK.fullmatch(stored.name)
            if match is None or int(match[1]) != last - 1:
                continue
            yield _copy_tensor(source / name, stored, PREFIX + match[2])
            if match[2] == "input_layernorm.weight":
                found = True
                yield from _new_tensors(stored.dtype, size)
    if not found:
        raise CorruptError(f"{source}: block {last - 1} has no tensor input_layernorm.weight")


def _copy_tensor(path: Path, stored: StoredTensor, name: str) -> Tensor:
    with path.open("rb") as file:
        file.seek(stored.start)
        data = file.read(stored.num_bytes)
    return Tensor(name=name, dtype=stored.dtype, shape=stored.shape, data=data)


def _new_tensors(dtype: str, size: int) -> Iterator[Tensor]:
    """Norms of ones, and a projection that adds up its two inputs.

    Raises:
        CorruptError: weights are in no format that a head can be in.
    """
    if dtype not in _ONES:
        raise CorruptError(f"weights are {dtype}, not one of {', '.join(_ONES)}")
    one = np.frombuffer(_ONES[dtype], np.uint8)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        data = np.tile(one, size).tobytes()
        yield Tensor(name=f"{PREFIX}{name}.weight", dtype=dtype, shape=(size,), data=data)
    words = np.zeros((size, 2, size, len(one)), np.uint8)
    words[np.arange(size), :, np.arange(size)] = one
    shape = (size, 2 * size)
    yield Tensor(name=f"{PREFIX}input_proj.weight", dtype=dtype, shape=shape, data=words.tobytes())
