"""A tokenizer of single bytes, for runs without a model."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from etude.agent.chat import CHAT_TEMPLATE, LAYOUT_TOKENS


def save_byte_tokenizer(folder: Path) -> None:
    """Write the files that a conversation's format is loaded from."""
    alphabet = {byte: i for i, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in LAYOUT_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
