"""Pieces of a tokenizer's model that are tags: text must not be read as them.

SentencePiece's vocabularies hold their control tokens as pieces, so that a Unigram model reads
</s> in a file as the end of a document, even with added tokens switched off.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

_HIDDEN = f"\ufdd2{secrets.token_hex(16)}"
"""Drawn for each process: a text that knew the beginning of hidden pieces could spell them."""


def forges_tags(plain: Tokenizer, layout: Mapping[str, Any], tags: Mapping[str, int]) -> bool:
    """True if a tokenizer can read a tag in text in which added tokens are switched off.

    Args:
        plain: the tokenizer, with added tokens switched off.
        layout: of its tokenizer.json.
        tags: ids by text.
    """
    if layout.get("normalizer") is not None and any(
        token.get("normalized") and token["content"] in tags for token in layout["added_tokens"]
    ):
        return True
    ids = frozenset(tags.values())
    texts = [text for tag in tags for text in (tag, f"a {tag} b")]
    return any(
        not ids.isdisjoint(encoding.ids)
        for encoding in plain.encode_batch_fast(texts, add_special_tokens=False)
    )


def hide_pieces(layout: Mapping[str, Any], tags: Mapping[str, int]) -> dict[str, Any]:
    """A layout whose model cannot read tags; every token has the id of before."""
    model = dict(layout["model"])
    unknown = model.get("unk_token")
    if isinstance(model["vocab"], dict):
        model["vocab"] = {_hide(text, tags, unknown): id_ for text, id_ in model["vocab"].items()}
        if model.get("merges"):
            hidden = tags.keys() - {unknown}
            model["merges"] = [m for m in model["merges"] if hidden.isdisjoint(_pieces_of(m))]
    else:
        model["vocab"] = [[_hide(text, tags, None), score] for text, score in model["vocab"]]
    tokens = [
        {**token, "content": _hide(token["content"], tags, unknown)}
        for token in layout["added_tokens"]
    ]
    return {**layout, "model": model, "added_tokens": tokens}


def _pieces_of(merge: str | Sequence[str]) -> tuple[str, str, str]:
    """The two sides of a merge, and what it makes of them."""
    # Older files write the two sides with a blank between them.
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _hide(text: str, tags: Mapping[str, int], unknown: str | None) -> str:
    # The model names its unknown token by its text.
    return f"{_HIDDEN}{text}" if text in tags and text != unknown else text
