"""Tokenizer of a model folder: text to tokens, with and without the tokenizer's added tokens."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from tokenizers import Tokenizer

from etude.agent.chat.folder import read_json, read_text, refuse_folder
from etude.agent.chat.model_pieces import forges_tags, hide_pieces
from etude.agent.chat.planting import TokenFinder
from etude.common.model_sources.added_tokens import join_added_tokens

_FIX = "use the tokenizer that the model was trained with"
_NESTED_CONFIGS = ("text_config", "llm_config", "language_config")
_TAG_LETTERS = frozenset("<>[]|｜")
_PRINTABLE = frozenset((*range(33, 127), *range(161, 173), *range(174, 256)))
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + index): byte
    for index, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
"""Bytes of the letters in which byte-level vocabularies are written.

Source: `bytes_to_unicode` of GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py.
"""


class EncodedText(NamedTuple):
    """Tokens of a text. N tokens."""

    token_ids: list[int]
    """[N]"""
    starts: list[int]
    """Position in the text, marks included, at which each token begins. [N]"""


class _Pair(NamedTuple):
    """Two readers of text."""

    tagged: Tokenizer
    """Reads the text of an added token as that token."""
    plain: Tokenizer
    """Reads the text of a tag as ordinary text."""


class _TokenBytes(dict[int, bytes]):
    """Bytes of the tokens of a byte-level tokenizer, of which text is the sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token) or ""
        # An added token may be any text.
        is_bytes = all(letter in _BYTES for letter in text)
        found = bytes(_BYTES[letter] for letter in text) if is_bytes else text.encode()
        self[token] = found
        return found


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One model's tokenizer."""

    folder: Path
    size: int
    """Rows of the model's embedding if config.json tells, else tokens of the tokenizer."""
    special_tokens: Mapping[str, str]
    """By their names in tokenizer_config.json, such as eos_token."""
    tags: Mapping[str, int]
    """Added tokens that structure a transcript: special ones, and ones that look like tags."""
    special: frozenset[str]
    """Tags that the tokenizer calls special."""
    finder: TokenFinder = field(repr=False)
    """Finds the text of tags."""
    _start: _Pair = field(repr=False)
    """For the beginning of a transcript."""
    _inner: _Pair = field(repr=False)
    """For its later parts."""
    _tag_ids: frozenset[int] = field(repr=False)
    _is_checked: bool = field(repr=False)
    """True if text that is not a tag's could be read as one, so that positions are checked."""
    _token_bytes: _TokenBytes | None = field(repr=False)
    """None for a tokenizer that is not byte-level."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer of a Hugging Face model folder; it needs no chat template.

        Raises:
            UserError: the folder has no tokenizer, a damaged one, or one with more tokens than
                the model's embedding has rows.
        """
        path = folder / "tokenizer.json"
        layout = _read_layout(folder)
        texts = [token["content"] for token in layout["added_tokens"] if _is_tag(token)]
        special = frozenset(t["content"] for t in layout["added_tokens"] if t["special"])
        try:
            start = _load_pair(layout)
            # Not the listed ids: a tokenizer numbers some of its added tokens itself.
            ids = start.tagged.get_vocab(with_added_tokens=True)
            tags = {text: ids[text] for text in texts}
            inner = _load_pair(_without_first_blank(layout)) if _has_first_blank(layout) else start
            forges = forges_tags(start.plain, layout, tags)
            if forges:
                hidden = hide_pieces(layout, tags)
                start = start._replace(plain=_load_plain(hidden))
                inner = (
                    inner._replace(plain=_load_plain(_without_first_blank(hidden)))
                    if _has_first_blank(layout)
                    else start
                )
            num_tokens = 1 + max(ids.values())
        except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception on bad files
            refuse_folder(path, f"is not a tokenizer: {error}", _FIX)
        return cls(
            folder,
            _count_rows(folder, num_tokens),
            _read_special_tokens(folder),
            tags,
            special,
            TokenFinder(tags),
            start,
            inner,
            frozenset(tags.values()),
            forges,
            _TokenBytes(start.tagged) if _is_byte_level(layout) else None,
        )

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text, in which nothing is a tag."""
        return _encode(self._start.plain, text)

    def encode_tagged(self, text: str, *, is_start: bool = False) -> list[int]:
        """Encode text in which the text of an added token is that token."""
        pair = self._start if is_start else self._inner
        return _encode(pair.tagged, text)

    def encode_marked(self, text: str, mark: str, *, is_start: bool) -> list[int]:
        """Encode text in which marked tags are ordinary text and the others are tokens.

        Without a mark this is `encode_tagged`. With one, the text between two tokens is encoded
        at a time, so that it has the tokens that a tokenizer without tags gives it.
        """
        if mark not in text and not self._is_checked:
            return self.encode_tagged(text, is_start=is_start)
        return self.encode_with_starts(text, mark, is_start=is_start).token_ids

    def encode_with_starts(self, text: str, mark: str, *, is_start: bool) -> EncodedText:
        """Encode as `encode_marked` does, and tell where each token begins."""
        pair = self._start if is_start else self._inner
        encoding = pair.tagged.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        starts = [start for start, _ in encoding.offsets]
        if mark not in text and not self._is_checked:
            return EncodedText(ids, starts)
        result = EncodedText([], [])
        for first, last, begin, end in self._sections(ids, encoding.offsets, text):
            section = text[begin:end]
            if mark in section or (
                self._is_checked and not self._tag_ids.isdisjoint(ids[first:last])
            ):
                reader = (pair if begin == 0 else self._inner).plain
                _append_plain(result, reader, section, mark, begin)
            else:
                result.token_ids.extend(ids[first:last])
                result.starts.extend(starts[first:last])
            if last < len(ids):
                result.token_ids.append(ids[last])
                result.starts.append(starts[last])
        return result

    def _sections(
        self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str
    ) -> Iterator[tuple[int, int, int, int]]:
        """Tokens [first, last) and text [begin, end) between neighbouring tags."""
        first = begin = 0
        for index, token in enumerate(ids):
            if token in self._tag_ids and self._is_written(token, text, offsets[index]):
                yield first, index, begin, offsets[index][0]
                first, begin = index + 1, offsets[index][1]
        yield first, len(ids), begin, len(text)

    def _is_written(self, token: int, text: str, place: tuple[int, int]) -> bool:
        """True if the text at a place is a tag's own, not one that is normalised to it."""
        return not self._is_checked or self.tags.get(text[slice(*place)].strip()) == token

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens, tags included; broken UTF-8 becomes U+FFFD."""
        if self._token_bytes is not None:
            # A tenth of the time of the tokenizer's own decoder.
            pieces = self._token_bytes
            return b"".join([pieces[token] for token in ids]).decode("utf-8", "replace")
        text: str = self._start.tagged.decode(ids, skip_special_tokens=False)
        return text

    def token_id(self, text: str) -> int | None:
        """The id of the token with this text; None if no single token has it."""
        found: int | None = self._start.tagged.token_to_id(text)
        return found

    def read_end_ids(self) -> frozenset[int]:
        """Read the tokens that end a completion by the model's generation settings.

        They are eos_token_id of generation_config.json or, as in transformers, of config.json
        where the folder has no generation_config.json.

        Raises:
            UserError: one is no token of the model.
        """
        path = self.folder / "generation_config.json"
        if not path.is_file():
            path = self.folder / "config.json"
        found = read_json(path).get("eos_token_id")
        listed = found if isinstance(found, list) else [] if found is None else [found]
        for each in listed:
            if type(each) is not int or not 0 <= each < self.size:
                what = f"eos_token_id is {each!r}; the model has tokens 0 to {self.size - 1}"
                refuse_folder(path, what, _FIX)
        return frozenset(listed)

    def encode_document(self, text: str) -> list[int]:
        """Encode a text of pre-training, with the token that ends it.

        Raises:
            UserError: the tokenizer declares no such token.
        """
        return [*self.encode_text(text), self.document_end()]

    def document_end(self) -> int:
        """Token that ends a text of pre-training: the tokenizer's declared eos_token.

        Raises:
            UserError: none is declared.
        """
        declared = self.special_tokens.get("eos_token")
        if declared is not None and (found := self.token_id(declared)) is not None:
            return found
        ends = self.read_end_ids()
        if len(ends) != 1:
            refuse_folder(
                self.folder / "tokenizer_config.json",
                "declares no eos_token, so texts would run into each other",
                "name the token that ends a document as eos_token",
            )
        return next(iter(ends))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # Without positions in the text, which take a third of the time.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _append_plain(
    result: EncodedText, reader: Tokenizer, section: str, mark: str, begin: int
) -> None:
    pieces = section.split(mark)
    encoding = reader.encode("".join(pieces), add_special_tokens=False)
    result.token_ids.extend(encoding.ids)
    # Positions count the marks, as those of the other sections do.
    edge, shift, rest = len(pieces[0]), begin, iter(pieces[1:])
    for start, _ in encoding.offsets:
        while start >= edge and (piece := next(rest, None)) is not None:
            edge += len(piece)
            shift += len(mark)
        result.starts.append(start + shift)


def _read_layout(folder: Path) -> dict[str, Any]:
    """Read tokenizer.json, with the added tokens that only other files of the folder list."""
    path = folder / "tokenizer.json"
    text = read_text(path)
    if text is None:
        refuse_folder(path, "is missing: the model has no fast tokenizer", _FIX)
    try:
        layout = json.loads(text)
        for token in layout["added_tokens"]:
            token["special"] = bool(token.get("special"))
        join_added_tokens(layout, {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        refuse_folder(path, f"is not a tokenizer: {error}", _FIX)
    layout["post_processor"] = None  # it only adds tokens that templates write themselves
    config_path = folder / "tokenizer_config.json"
    try:
        layout["added_tokens"] = join_added_tokens(layout, read_json(config_path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        refuse_folder(config_path, f"added_tokens_decoder cannot be read: {error!r}", _FIX)
    return dict(layout)


def _is_tag(token: Mapping[str, Any]) -> bool:
    # Words and runs of blanks that are added tokens are text like any other.
    return bool(token["special"]) or len(_TAG_LETTERS.intersection(token["content"])) > 1


def _is_byte_level(layout: Mapping[str, Any]) -> bool:
    decoder = layout.get("decoder")
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _load_pair(layout: Mapping[str, Any]) -> _Pair:
    tagged = Tokenizer.from_str(json.dumps(layout))
    tagged.no_padding()
    tagged.no_truncation()
    return _Pair(tagged, _load_plain(layout))


def _load_plain(layout: Mapping[str, Any]) -> Tokenizer:
    # Only special tokens can be switched off.
    tokens = [{**token, "special": _is_tag(token)} for token in layout["added_tokens"]]
    plain = Tokenizer.from_str(json.dumps({**layout, "added_tokens": tokens}))
    plain.encode_special_tokens = True
    plain.no_padding()
    plain.no_truncation()
    return plain


def _has_first_blank(layout: Mapping[str, Any]) -> bool:
    """True if the tokenizer puts a blank before the first word of a text, and of no other part."""
    return '"prepend_scheme": "first"' in json.dumps(layout.get("pre_tokenizer"))


def _without_first_blank(layout: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(layout["pre_tokenizer"])
    text = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    return {**layout, "pre_tokenizer": json.loads(text)}


def _count_rows(folder: Path, num_tokens: int) -> int:
    """Rows of the embedding, which every token must have.

    Raises:
        UserError: a token has none.
    """
    path = folder / "config.json"
    config = read_json(path)
    sizes = [config.get("vocab_size")]
    nested = (config.get(name) for name in _NESTED_CONFIGS)
    sizes += [each.get("vocab_size") for each in nested if isinstance(each, dict)]
    rows = next((size for size in sizes if isinstance(size, int)), None)
    if rows is None:
        return num_tokens
    if num_tokens > rows:
        refuse_folder(
            folder / "tokenizer.json",
            f"has token {num_tokens - 1}, and the model's embedding has {rows} rows"
            f" ({path.name}: vocab_size)",
            f"{_FIX}, or resize the model's embedding",
        )
    return rows


def _read_special_tokens(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found
