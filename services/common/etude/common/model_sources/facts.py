"""Facts about a model from its configuration and the headers of its weights, without torch."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from etude.common.errors import CorruptError
from etude.common.model_sources.files import CONFIG, RemoteModel, read_object
from etude.common.weights.tensors import safetensors
from etude.common.weights.tensors.safetensors import StoredTensor

_LENGTH_BYTES = 8
# Models with vision or several parts keep the language model's sizes in a nested object.
_NESTED = ("text_config", "llm_config", "language_config")


class ModelFacts(NamedTuple):
    """Size and shape of a model."""

    architecture: str
    model_type: str
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    experts: int | None
    """Of a layer; None for a dense model."""
    context: int | None
    """Positions."""
    vocabulary: int | None
    """Rows of the embedding."""
    is_tied: bool | None
    """The output head is the embedding; None if neither configuration nor tensors tell."""
    parameters: Mapping[str, int]
    """Number of elements by number format; empty for a model without weights."""
    num_bytes: int
    """Of all files of weights."""
    num_files: int


def read_facts(model: RemoteModel) -> ModelFacts:
    """Facts about a model; of its weights only the headers are read.

    Raises:
        UserError: a file is no JSON, or the source refuses.
        CorruptError: a file of weights has a damaged header.
        UnavailableError: the source gave no answer.
    """
    config = read_object(model, CONFIG) or {}
    tensors = list(_tensors(model))
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[tensor.dtype] += tensor.num_bytes // safetensors.ITEM_BYTES[tensor.dtype]
    weights = [file for file in model.files if file.name.endswith(".safetensors")]
    names = {tensor.name for tensor in tensors}
    return ModelFacts(
        architecture=", ".join(map(str, config.get("architectures") or ())) or "not named",
        model_type=str(config.get("model_type", "not named")),
        layers=_count(config, "num_hidden_layers"),
        hidden=_count(config, "hidden_size"),
        heads=_count(config, "num_attention_heads"),
        kv_heads=_count(config, "num_key_value_heads"),
        experts=_count(config, "num_experts")
        or _count(config, "num_local_experts")
        or _count(config, "n_routed_experts"),
        context=_count(config, "max_position_embeddings"),
        vocabulary=_count(config, "vocab_size"),
        is_tied=_is_tied(config, names),
        parameters=dict(elements),
        num_bytes=sum(file.size for file in weights),
        num_files=len(weights),
    )


def _tensors(model: RemoteModel) -> Iterator[StoredTensor]:
    for file in model.files:
        if not file.name.endswith(".safetensors"):
            continue
        where = f"{model.uri}: {file.name}"
        if file.size < _LENGTH_BYTES:
            raise CorruptError(f"{where}: {file.size} bytes, too short for a header")
        start = model.read(file, 0, _LENGTH_BYTES)
        length = min(file.size, safetensors.header_bytes(start, where=where))
        header = model.read(file, 0, length)
        yield from safetensors.list_tensors(header, file.size, where=where)


def _find(config: Mapping[str, Any], name: str) -> object:
    nested = [config.get(part) for part in _NESTED]
    parts = [config, *(part for part in nested if isinstance(part, dict))]
    return next((part[name] for part in parts if part.get(name) is not None), None)


def _count(config: Mapping[str, Any], name: str) -> int | None:
    value = _find(config, name)
    return value if type(value) is int else None


def _is_tied(config: Mapping[str, Any], names: set[str]) -> bool | None:
    """Prefer what the files hold: configurations leave out what is their class's default."""
    if names:
        return not any(name.endswith("lm_head.weight") for name in names)
    value = _find(config, "tie_word_embeddings")
    return value if isinstance(value, bool) else None
