"""A model with further tokens, or another chat template: what changes in its files.

The row of a new token, in the embedding and in the output layer, is the mean of the rows of all
known tokens: no logit of a known token changes, and the new token is as likely as the average.
Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"; transformers
does the same (`resize_token_embeddings`, there with noise).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from typing_extensions import override

from etude.common.errors import Problem, UserError
from etude.common.model_sources.added_tokens import join_added_tokens
from etude.common.model_sources.extended_weights import ChangedFile, extend_weights, read_parts
from etude.common.model_sources.files import (
    CONFIG,
    INDEX,
    ModelFile,
    RemoteModel,
    read_object,
)

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
FIELD = "model.addTokens"
_NESTED = ("text_config", "llm_config", "language_config")
_CHUNK_BYTES = 16 << 20


class ModelChanges(NamedTuple):
    """Further tokens and a chat template of a model."""

    tokens: Sequence[str] = ()
    """Texts that become one token each; those that the tokenizer has stay as they are."""
    template: str | None = None
    """Source of the chat template; None keeps the model's own."""
    end: str = ""
    """Token that ends a turn of that template."""


class Vocabulary(NamedTuple):
    """Number of tokens and of rows of a model, before and after a change."""

    known: int
    """Tokens of the tokenizer before."""
    tokens: int
    """Tokens after."""
    rows: int
    """Rows of the embedding before, some perhaps without a token."""

    @property
    def new_rows(self) -> int:
        """Rows of the embedding after."""
        return max(self.rows, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendedModel(RemoteModel):
    """A changed model, computed from another one as it is read."""

    uri: str
    name: str
    files: Sequence[ModelFile]
    source: RemoteModel
    texts: Mapping[str, bytes]
    """Changed files that are held."""
    weights: Mapping[str, ChangedFile]
    """Changed files of weights."""

    @override
    def read(self, file: ModelFile, start: int, length: int) -> bytes:
        if file.name in self.texts:
            return self.texts[file.name][start : start + length]
        of_source = next((each for each in self.source.files if each.name == file.name), file)
        if file.name in self.weights:
            parts = self.weights[file.name].parts
            return read_parts(self.source, of_source, parts, start, length)
        return self.source.read(of_source, start, length)


def extend_model(source: RemoteModel, changes: ModelChanges) -> ExtendedModel:
    """The model with the changes.

    Raises:
        UserError: the model cannot be changed so.
        CorruptError: a file of weights is damaged.
        UnavailableError: the source gave no answer.
    """
    config = read_object(source, CONFIG) or {}
    layout = read_object(source, TOKENIZER)
    if layout is None:
        _refuse(source, TOKENIZER, "is missing: the model has no fast tokenizer")
    texts: dict[str, object] = {}
    ids, sizes = _add_tokens(source, layout, changes.tokens, _read_rows(config))
    if sizes.known > sizes.rows:
        _refuse(source, CONFIG, f"has a vocab_size of {sizes.rows} for {sizes.known} tokens")
    weights: dict[str, ChangedFile] = {}
    if ids:
        texts[TOKENIZER] = layout
        texts |= _tell_tokenizer_config(source, ids)
    if sizes.tokens > sizes.known:
        weights = extend_weights(source, known=sizes.known, tokens=sizes.tokens, rows=sizes.rows)
    if sizes.new_rows > sizes.rows:
        texts[CONFIG] = _set_rows(config, sizes.new_rows)
        texts |= _tell_index(source, sum(each.growth for each in weights.values()))
    if changes.template is not None:
        texts |= _tell_end(source, config, layout, changes.end)
    written = {name: _to_json(value) for name, value in texts.items()}
    if changes.template is not None:
        written[TEMPLATE] = changes.template.encode()
    return _describe(source, written, weights)


def _add_tokens(
    source: RemoteModel, layout: dict[str, Any], tokens: Sequence[str], rows: int | None
) -> tuple[dict[str, int], Vocabulary]:
    """Add tokens to a tokenizer's layout; the ids of those that it lacked, and the sizes."""
    config = read_object(source, TOKENIZER_CONFIG) or {}
    try:
        given = layout["model"]["vocab"]
        pieces = given if isinstance(given, dict) else {row[0]: i for i, row in enumerate(given)}
        known = 1 + max([*pieces.values(), *(int(each["id"]) for each in layout["added_tokens"])])
        joined = join_added_tokens(layout, config)
        for further in joined[len(layout["added_tokens"]) :]:
            # Written there too from now on: else it would be numbered after the new ones.
            further["id"] = pieces.get(further["content"], known)
            known = max(known, further["id"] + 1)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as cause:
        _refuse(source, TOKENIZER, f"is not a tokenizer: {cause!r}")
    layout["added_tokens"] = joined
    added = {each["content"] for each in joined}
    ids: dict[str, int] = {}
    size = known
    for token in dict.fromkeys(tokens):
        if token in added:
            continue
        ids[token] = pieces.get(token, size)
        size += token not in pieces
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    layout["added_tokens"] += [
        {"id": id_, "content": token, **flags, "special": True} for token, id_ in ids.items()
    ]
    return ids, Vocabulary(known, size, known if rows is None else rows)


def _tell_tokenizer_config(source: RemoteModel, ids: Mapping[str, int]) -> dict[str, object]:
    """tokenizer_config.json with the new tokens, if it lists any."""
    config = read_object(source, TOKENIZER_CONFIG) or {}
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return {}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    further = {str(id_): {"content": token, **flags, "special": True} for token, id_ in ids.items()}
    return {TOKENIZER_CONFIG: {**config, "added_tokens_decoder": {**listed, **further}}}


def _tell_index(source: RemoteModel, growth: int) -> dict[str, object]:
    """The index of the weights with their new size, if there is one."""
    index = read_object(source, INDEX)
    metadata = (index or {}).get("metadata")
    if index is None or not isinstance(metadata, dict) or "total_size" not in metadata:
        return {}
    size = metadata["total_size"] + growth
    return {INDEX: {**index, "metadata": {**metadata, "total_size": size}}}


def _tell_end(
    source: RemoteModel, config: Mapping[str, Any], layout: Mapping[str, Any], end: str
) -> dict[str, object]:
    """generation_config.json with the token that ends turns: whatever serves the model reads it."""
    ids = [token["id"] for token in layout["added_tokens"] if token["content"] == end]
    generation = read_object(source, GENERATION)
    given = (config if generation is None else generation).get("eos_token_id")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    if not ids or ids[0] in listed:
        return {}
    return {GENERATION: {**(generation or {}), "eos_token_id": [*listed, *ids]}}


def _read_rows(config: Mapping[str, Any]) -> int | None:
    nested = (config.get(name) for name in _NESTED)
    parts = [config, *(part for part in nested if isinstance(part, dict))]
    found = (part.get("vocab_size") for part in parts)
    return next((size for size in found if type(size) is int), None)


def _set_rows(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The configuration with another number of rows, wherever it tells one."""
    changed = dict(config)
    for name in _NESTED:
        if isinstance(changed.get(name), dict) and "vocab_size" in changed[name]:
            changed[name] = {**changed[name], "vocab_size": rows}
    if "vocab_size" in changed or changed == config:
        changed["vocab_size"] = rows
    return changed


def _describe(
    source: RemoteModel, texts: Mapping[str, bytes], weights: Mapping[str, ChangedFile]
) -> ExtendedModel:
    """The changed model with sizes and digests of its files."""
    before = {file.name: file for file in source.files}
    after = dict(before)
    for name, data in texts.items():
        digest = hashlib.sha256(data).hexdigest()
        after[name] = ModelFile(name, len(data), f"sha256:{digest}")
    for name, changed in weights.items():
        digest = _digest(source, before[name], changed)
        after[name] = ModelFile(name, changed.size, f"sha256:{digest}")
    return ExtendedModel(
        uri=source.uri,
        name=source.name,
        files=tuple(after[name] for name in sorted(after)),
        source=source,
        texts=texts,
        weights=weights,
    )


def _digest(source: RemoteModel, file: ModelFile, changed: ChangedFile) -> str:
    digest = hashlib.sha256()
    for start in range(0, changed.size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, changed.size - start)
        digest.update(read_parts(source, file, changed.parts, start, length))
    return digest.hexdigest()


def _to_json(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()


def _refuse(source: RemoteModel, name: str, what: str) -> NoReturn:
    fix = "name a model folder as Hugging Face has it, or remove model.addTokens"
    raise UserError(Problem("InvalidModel", what, f"{FIELD}: {source.uri}: {name}", fix))
