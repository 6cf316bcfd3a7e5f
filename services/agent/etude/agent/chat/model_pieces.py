"""Pieces of a tokenizer's model that are tags: text must not be read as them.

SentencePiece's vocabularies hold their control tokens as pieces, so that a Unigram model reads
</s> in a file as the end of a document, even with added tokens switched off.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

_HIDDEN = "\ufdd2"
"""A noncharacter: no text has it, so a piece that begins with it is never read."""


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
            model["merges"] = [each for each in model["merges"] if _join_merge(each) not in tags]
    else:
        model["vocab"] = [[_hide(text, tags, None), score] for text, score in model["vocab"]]
    tokens = [
        {**token, "content": _hide(token["content"], tags, unknown)}
        for token in layout["added_tokens"]
    ]
    return {**layout, "model": model, "added_tokens": tokens}


def _join_merge(merge: str | Sequence[str]) -> str:
    # Older files write the two sides with a blank between them.
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)


def _hide(text: str, tags: Mapping[str, int], unknown: str | None) -> str:
    # The model names its unknown token by its text.
    return f"{_HIDDEN}{text}" if text in tags and text != unknown else text
