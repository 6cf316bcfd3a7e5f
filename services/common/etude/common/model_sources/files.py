"""Files of a model folder: those that are used, and those that refuse it."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from etude.common.errors import Problem, UserError

MAX_FILES = 10_000
MAX_TEXT_BYTES = 64 << 20
"""Largest file that is read as JSON: the tokenizers of multilingual models have 33 MB."""

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._]*\.safetensors")
_TEXTS = frozenset(
    {
        CONFIG,
        INDEX,
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
        "preprocessor_config.json",
        "LICENSE",
        "LICENSE.txt",
    }
)
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack")
GGUF_FIX = (
    "name a folder with safetensors; examples/smollm2/convert.py converts one GGUF model, and shows"
    " how another is converted"
)


class ModelFile(NamedTuple):
    """One file of a model."""

    name: str
    """Without a folder."""
    size: int
    digest: str
    """sha256:HEX of the content, or git:HEX, the SHA-1 of the git blob."""


class RemoteModel(Protocol):
    """A model folder that is read by ranges; its content never changes."""

    uri: str
    """Where it is; names a commit if the source has any."""
    name: str
    """For people: the last part of the URI."""
    files: Sequence[ModelFile]
    """The files that are used, sorted by name."""

    def read(self, file: ModelFile, start: int, length: int) -> bytes:
        """Exactly `length` bytes of a file; safe to call from threads.

        Raises:
            UserError: the source refuses.
            UnavailableError: it gave no answer.
        """
        ...


def select_files(names: Iterable[str], *, where: str) -> list[str]:
    """The files of a model that are used: safetensors, tokenizer, configuration; sorted.

    Raises:
        UserError: the folder holds no configuration or weights in a form that is not read.
    """
    given = sorted(set(names))
    used = [name for name in given if name in _TEXTS or _WEIGHTS.fullmatch(name)]
    if len(given) > MAX_FILES:
        raise UserError(
            _problem(f"has {len(given)} files", where, f"name a folder of at most {MAX_FILES}")
        )
    has_weights = any(name.endswith(".safetensors") for name in used)
    if not has_weights:
        _refuse_other_weights(given, where)
    if CONFIG not in used:
        raise UserError(_problem(f"holds no {CONFIG}", where, "give a Hugging Face model folder"))
    return used


def _refuse_other_weights(names: Sequence[str], where: str) -> None:
    """Refuse a folder whose only weights are GGUF files or pickles.

    Raises:
        UserError: they are.
    """
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if gguf:
        raise UserError(_problem(f"holds weights as GGUF alone ({gguf[0]})", where, GGUF_FIX))
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        fix = "name a revision with safetensors, or convert it: load and save_pretrained once"
        what = f"holds no safetensors; {pickles[0]} may run code when it is read"
        raise UserError(_problem(what, where, fix))


def check_config(config: Mapping[str, Any], *, where: str) -> None:
    """Refuse a configuration whose model or tokenizer is code of the folder.

    Raises:
        UserError: it is.
    """
    code = config.get("auto_map")
    if code:
        first = next(iter(code.items())) if isinstance(code, dict) else ("", code)
        what = f"has auto_map {first[0]}: {str(first[1])[:120]}: code of the folder is never run"
        fix = (
            "if the installed transformers has this model_type, delete auto_map; else choose"
            " another model: there is no trust_remote_code"
        )
        raise UserError(_problem(what, where, fix))


def check_index(index: Mapping[str, Any], names: Iterable[str], *, where: str) -> None:
    """Refuse an index of weights that names files which are absent.

    Raises:
        UserError: it does, or it is none.
    """
    shards = index.get("weight_map")
    if not isinstance(shards, dict):
        raise UserError(
            _problem("has no weight_map", where, "upload the index of the weights again")
        )
    absent = sorted({str(shard) for shard in shards.values()} - set(names))
    if absent:
        what = f"names {len(absent)} files that are absent, first {absent[0][:120]!r}"
        raise UserError(_problem(what, where, "upload the missing files, or name another revision"))


def parse_object(data: bytes, *, where: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: it holds none.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as cause:
        raise UserError(_problem(f"is no JSON: {cause}", where, "upload the file again")) from cause
    if not isinstance(value, dict):
        raise UserError(_problem("is no JSON object", where, "upload the file again"))
    return value


def read_object(model: RemoteModel, name: str) -> dict[str, Any] | None:
    """The object in one of the model's JSON files; None without such a file.

    Raises:
        UserError: the file is too large, or holds no object.
        UnavailableError: the source gave no answer.
    """
    file = next((file for file in model.files if file.name == name), None)
    if file is None:
        return None
    where = f"{model.uri}: {name}"
    if file.size > MAX_TEXT_BYTES:
        what = f"has {file.size} bytes"
        raise UserError(_problem(what, where, f"give a file of at most {MAX_TEXT_BYTES} bytes"))
    return parse_object(model.read(file, 0, file.size), where=where)


def check_model(model: RemoteModel) -> None:
    """Refuse a model with code of its own, or with files that are absent.

    Raises:
        UserError: it has.
        UnavailableError: the source gave no answer.
    """
    for name in (CONFIG, "tokenizer_config.json"):
        check_config(read_object(model, name) or {}, where=f"{model.uri}: {name}")
    index = read_object(model, INDEX)
    if index is not None:
        names = [file.name for file in model.files]
        check_index(index, names, where=f"{model.uri}: {INDEX}")


def _problem(what: str, where: str, fix: str) -> Problem:
    return Problem("InvalidModel", what, where, fix)
