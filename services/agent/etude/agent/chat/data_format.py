"""Token format of supervised data: transcripts need a chat template, texts only a tokenizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.agent.chat.format import ChatFormat
from etude.agent.chat.supervised import SupervisedTokens
from etude.agent.chat.vocabulary import Vocabulary


class DataFormat:
    """One model's tokens for supervised data; the chat template is tried and loaded on first use.

    It is tried even if the run's rollouts have tried it: this may be another host, and a template
    that hangs here would hang the learner.
    """

    def __init__(self, model_folder: Path) -> None:
        """Load the tokenizer.

        Raises:
            UserError: the folder has none that works.
        """
        self.vocabulary = Vocabulary.load(model_folder)
        self._chat: ChatFormat | None = None

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> SupervisedTokens:
        """Encode a transcript, as `ChatFormat.encode_messages` does.

        Raises:
            InvalidFieldError: a message has an unknown role or the wrong kind of content.
            UserError: the folder has no chat template that works.
        """
        if self._chat is None:
            # Also a program, which must not be imported before it is run.
            from etude.agent.chat.trial import check_chat_format  # noqa: PLC0415

            check_chat_format(self.vocabulary.folder)
            self._chat = ChatFormat.of(self.vocabulary)
        return self._chat.encode_messages(messages, tools)

    def encode_document(self, text: str) -> list[int]:
        """Encode a text of pre-training, with the token that ends it.

        Raises:
            UserError: the tokenizer declares no such token.
        """
        return self.vocabulary.encode_document(text)
