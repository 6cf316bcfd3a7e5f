"""Added tokens of a tokenizer, from the two files that list them.

Source: transformers 5, `TokenizersBackend.__init__`: it adds the tokens of added_tokens_decoder in
the order of their ids to those of tokenizer.json, and their flags replace the flags there.
"""

from collections.abc import Mapping
from typing import Any

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def join_added_tokens(layout: Mapping[str, Any], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Join added_tokens of tokenizer.json and added_tokens_decoder of tokenizer_config.json.

    Tokens that only the second lists come last, with the ids that it lists. A tokenizer numbers
    those that are no pieces of its model itself, one after the other, whatever is listed.

    Args:
        layout: tokenizer.json.
        config: tokenizer_config.json.

    Raises:
        ValueError: a key is no number.
        KeyError: a token has no content.
        TypeError: something is no list or no object.
        AttributeError: the same.
    """
    decoder = config.get("added_tokens_decoder") or {}
    listed = {
        token["content"]: {"id": int(key)} | {flag: bool(token.get(flag)) for flag in _FLAGS}
        for key, token in sorted(decoder.items(), key=lambda entry: int(entry[0]))
    }
    known = layout["added_tokens"]
    joined = [{**token, **listed.pop(token["content"], {}), "id": token["id"]} for token in known]
    return [*joined, *({"content": content, **token} for content, token in listed.items())]
