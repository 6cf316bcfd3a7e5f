"""Chat format of a model: its tokenizer and its chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from etude.agent.chat.conversation import Conversation
from etude.agent.chat.folder import read_json, refuse_folder
from etude.agent.chat.messages import map_texts, read_messages, texts_of
from etude.agent.chat.plain import CHAT_TEMPLATE, LAYOUT_TOKENS
from etude.agent.chat.planting import TokenFinder, choose_mark
from etude.agent.chat.supervised import SupervisedTokens, encode_transcript
from etude.agent.chat.template import ChatTemplate, TemplateError, read_template
from etude.agent.chat.traits import TemplateTraits, find_traits, make_message
from etude.agent.chat.vocabulary import Vocabulary
from etude.agent.tool_messages import RenderedMessage, ShownTools
from etude.common.errors import InvalidFieldError


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One model's tokens for conversations."""

    vocabulary: Vocabulary
    template: ChatTemplate
    traits: TemplateTraits
    end_id: int
    """Token that ends the assistant's turns in the template."""
    end_ids: frozenset[int]
    """All tokens that end a completion."""
    assistant_finder: TokenFinder = field(repr=False)
    """Finds tags that would end or open a turn inside the assistant's text."""

    @classmethod
    def load(cls, model_folder: Path) -> Self:
        """Load the format of a Hugging Face model folder.

        Args:
            model_folder: with tokenizer.json, and tokenizer_config.json or chat_template.jinja.

        Raises:
            UserError: the folder has no tokenizer or no template, or one that does not work; or
                nothing tells the token that ends a turn.
        """
        return cls.of(Vocabulary.load(model_folder))

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Self:
        """Join a loaded tokenizer and its folder's template.

        Raises:
            UserError: as `load`.
        """
        compiled = _load_template(vocabulary)
        traits = find_traits(compiled, vocabulary.finder)
        end_ids = vocabulary.read_end_ids()
        end_id = vocabulary.tags.get(traits.end)
        if end_id is not None:
            end_ids |= {end_id}
        if not end_ids:
            refuse_folder(
                vocabulary.folder / "generation_config.json",
                "names no eos_token_id, and the chat template writes no token after the"
                " assistant's turns: a completion would never end",
                "name the token that ends the assistant's turns as eos_token_id",
            )
        ends = {tag for tag, token in vocabulary.tags.items() if token in end_ids}
        return cls(
            vocabulary,
            compiled,
            traits,
            min(end_ids) if end_id is None else end_id,
            end_ids,
            TokenFinder(ends | (traits.frame & vocabulary.special)),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model can sample."""
        return self.vocabulary.size

    def open(
        self,
        system: str,
        user: str,
        shown: ShownTools | None = None,
    ) -> Conversation:
        """Open the conversation of a rollout.

        Args:
            system: system prompt.
            user: instruction.
            shown: tools for the template; None if the system prompt describes them.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        return Conversation.open(self, system, user, shown)

    def open_transcript(
        self, messages: Sequence[RenderedMessage], shown: ShownTools | None = None
    ) -> Conversation:
        """Open a conversation that may have turns of the assistant already.

        Args:
            messages: up to the one that is answered.
            shown: tools for the template; None if the messages describe them, or there are none.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        return Conversation.open_transcript(self, messages, shown)

    def make_text_results(self, results: Sequence[str]) -> list[RenderedMessage]:
        """Make the messages with results of calls that the template was given as text."""
        if self.traits.has_tool_role:
            return [make_message("tool", result) for result in results]
        wrapped = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
        return [make_message("user", "\n".join(wrapped))]

    def completion(self, text: str) -> list[int]:
        """Encode a turn written as text, as if it had been sampled: tags are tokens."""
        return [*self.vocabulary.encode_tagged(text), self.end_id]

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text, in which nothing is a tag."""
        return self.vocabulary.encode_text(text)

    def encode_document(self, text: str) -> list[int]:
        """Encode a text of pre-training, with the token that ends it.

        Raises:
            UserError: the tokenizer declares no such token.
        """
        return self.vocabulary.encode_document(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens, tags included; broken UTF-8 becomes U+FFFD."""
        return self.vocabulary.decode(ids)

    def plant(self, messages: Sequence[RenderedMessage], mark: str) -> list[RenderedMessage]:
        """Mark the tags in the texts of messages, so that they are encoded as text."""
        return [self.plant_one(message, mark) for message in messages]

    def plant_one(self, message: RenderedMessage, mark: str) -> RenderedMessage:
        """Mark the tags in the texts of one message.

        In the assistant's text only those that end or open turns are marked: the others are its
        own, such as the tags of a tool call.
        """
        is_reply = message["role"] == "assistant"
        finder = self.assistant_finder if is_reply else self.vocabulary.finder
        if len(message) == 2:  # role and text, as nearly all
            return {"role": message["role"], "content": finder.plant(message["content"], mark)}
        planted: dict[str, Any] = {}
        for key, value in message.items():
            if key == "role":
                planted[key] = value
            elif isinstance(value, str):
                planted[key] = finder.plant(value, mark)
            else:
                planted[key] = map_texts(value, lambda text: finder.plant(text, mark))
        return planted

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> SupervisedTokens:
        """Encode a whole transcript for supervised training.

        Args:
            messages: of the transcript.
            tools: JSON schemas that the template shows.

        Raises:
            InvalidFieldError: a message has an unknown role or the wrong kind of content, or the
                template refuses the transcript.
        """
        read = read_messages(messages)
        if not self.traits.has_system:
            read = merge_system(read)
        mark = choose_mark(texts_of([*read, {"tools": tools}]))
        planted = self.plant(read, mark)
        if tools:
            finder = self.vocabulary.finder
            tools = map_texts(tools, lambda text: finder.plant(text, mark))
        try:
            return encode_transcript(self, planted, mark, tools)
        except TemplateError as error:
            raise InvalidFieldError(
                "messages", f"the chat template refuses them: {error}"
            ) from error


def merge_system(messages: Sequence[RenderedMessage]) -> list[RenderedMessage]:
    """Put system texts before the next user message, for templates without a system role."""
    merged: list[RenderedMessage] = []
    texts: list[str] = []
    for message in messages:
        if message["role"] == "system":
            texts.append(message["content"])
        elif message["role"] == "user" and texts:
            merged.append({**message, "content": "\n\n".join([*texts, message["content"]])})
            texts = []
        else:
            merged.append(message)
    return merged


def _load_template(vocabulary: Vocabulary) -> ChatTemplate:
    folder = vocabulary.folder
    found = read_template(folder, read_json(folder / "tokenizer_config.json"))
    if found is None:
        refuse_folder(
            folder / "tokenizer_config.json",
            "has no chat_template: the model was not trained for chat",
            "give a model with a chat template, or set model.chat.template: Plain; outside of runs,"
            f" python -m etude.agent.chat.plain > {folder / 'chat_template.jinja'}",
            "WrongChatTemplate",
        )
    source, path = found
    missing = [token for token in LAYOUT_TOKENS if token not in vocabulary.tags]
    if source.strip() == CHAT_TEMPLATE and missing:
        # Without its tokens, any text could pose as a turn.
        refuse_folder(
            folder / "tokenizer.json",
            f"lacks the tokens of the Plain template: {' '.join(missing)}",
            f"set model.addTokens: [{', '.join(map(repr, missing))}]",
        )
    now = datetime.now(UTC).astimezone()
    return ChatTemplate.compile(source, path=path, variables=vocabulary.special_tokens, now=now)
