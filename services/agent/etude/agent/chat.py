"""Chat format: the token layout of a transcript; sampled ids are never tokenised again.

    <|system|>S<|end|><|user|>I<|end|>(<|assistant|>A<|end|><|tool|>R+<|end|>)*<|assistant|>A<|end|>
    R = <tool_response>text</tool_response>

Instructions and tool output are encoded with every special token switched off: a file that holds
the text "<|end|>" cannot end a turn. What the assistant wrote may hold special tokens.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, Self, TypedDict

from tokenizers import Tokenizer

from etude.common.errors import InvalidFieldError, Problem, UserError

END = "<|end|>"
LAYOUT_TOKENS = (
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    END,
    "<tool_response>",
    "</tool_response>",
)
"""Tokens that a tokenizer must have as one id each."""

CHAT_TEMPLATE = (
    "{%- macro text(content) -%}"
    "{%- if content is string -%}{{ content }}"
    "{%- else -%}{%- for part in content or [] -%}{{ part.text }}{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{%- macro value(given) -%}"
    "{%- set shown = given if given is string else given | tojson -%}"
    "{%- set edge = '\\n' if shown[:1] == '\\n' or shown[-1:] == '\\n' else '' -%}"
    "{{ edge }}{{ shown }}{{ edge }}"
    "{%- endmacro -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "{%- if loop.first or loop.previtem.role != 'tool' -%}<|tool|>{%- endif -%}"
    "{%- if message.content is string or message.content[0] is mapping -%}"
    "<tool_response>{{ text(message.content) }}</tool_response>"
    "{%- else -%}"
    "{%- for result in message.content or [] -%}"
    "<tool_response>{{ result }}</tool_response>"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- if loop.last or loop.nextitem.role != 'tool' -%}<|end|>{%- endif -%}"
    "{%- else -%}"
    "<|{{ message.role }}|>{{ text(message.content) }}"
    "{%- for call in message.tool_calls or [] -%}"
    "<tool_call><function={{ call.function.name }}>"
    "{%- for name, given in call.function.arguments.items() -%}"
    "<parameter={{ name }}>{{ value(given) }}</parameter>"
    "{%- endfor -%}"
    "</function></tool_call>"
    "{%- endfor -%}"
    "<|end|>"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""The same layout for chat endpoints; several tool messages in a row are one tool turn."""


class Message(TypedDict):
    """One turn; a tool turn's content lists its results in call order."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Sequence[str]


class SupervisedTokens(NamedTuple):
    """A finished transcript with its authorship."""

    token_ids: list[int]
    written: list[bool]
    """True where the assistant wrote the token, its <|end|> included."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One model's tokenizer, used for our layout."""

    end_id: int
    vocab_size: int
    _ids: dict[str, int]
    _plain: Tokenizer
    """Reads special tokens as ordinary text."""
    _tagged: Tokenizer

    @classmethod
    def load(cls, model_folder: Path) -> Self:
        """Load the format of a Hugging Face model folder.

        Raises:
            UserError: the folder has no tokenizer, or one without the layout's tokens.
        """
        path = model_folder / "tokenizer.json"
        try:
            layout = json.loads(path.read_text("utf-8"))
            for token in layout["added_tokens"]:
                # Some tokenizers ship tags as ordinary added tokens, which cannot be switched off.
                token["special"] = True
            text = json.dumps(layout)
            plain, tagged = Tokenizer.from_str(text), Tokenizer.from_str(text)
        except FileNotFoundError:
            _refuse(path, "the model has no tokenizer.json")
        except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception on bad files
            _refuse(path, f"not a tokenizer: {error}")
        plain.encode_special_tokens = True
        found = {token: tagged.token_to_id(token) for token in LAYOUT_TOKENS}
        ids = {token: token_id for token, token_id in found.items() if token_id is not None}
        if len(ids) < len(found):
            _refuse(path, f"the tokenizer lacks {' '.join(sorted(found.keys() - ids.keys()))}")
        _check_end(model_folder / "tokenizer_config.json")
        return cls(ids[END], tagged.get_vocab_size(with_added_tokens=True), ids, plain, tagged)

    def opening(self, system: str, user: str) -> list[int]:
        """The first prompt: system, user, and the start of the assistant's turn."""
        return [
            *self._turn("<|system|>", system),
            *self._turn("<|user|>", user),
            self._ids["<|assistant|>"],
        ]

    def tool_turn(self, results: Sequence[str]) -> list[int]:
        """Tokens after a completion that ended with <|end|>: results, and the next turn's start."""
        return [*self._tool(results), self._ids["<|assistant|>"]]

    def completion(self, text: str) -> list[int]:
        """A turn written as text, as if it had been sampled: tags are tags, <|end|> closes it."""
        return [*self._tagged.encode(text, add_special_tokens=False).ids, self.end_id]

    def encode_text(self, text: str) -> list[int]:
        """Plain text, in which nothing is a special token."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included; broken UTF-8 becomes U+FFFD."""
        text: str = self._tagged.decode(ids, skip_special_tokens=False)
        return text

    def encode_messages(self, messages: Sequence[Message]) -> SupervisedTokens:
        """A whole transcript for supervised training.

        Raises:
            InvalidFieldError: a message has an unknown role or the wrong kind of content.
        """
        token_ids: list[int] = []
        written: list[bool] = []
        for index, message in enumerate(messages):
            ids, author = self._message(message, index)
            token_ids += ids
            # The opening tag is the harness's even in a turn that the assistant wrote.
            written += [False, *[author] * (len(ids) - 1)]
        return SupervisedTokens(token_ids, written)

    def _message(self, message: Message, index: int) -> tuple[list[int], bool]:
        match message:
            case {"role": "assistant", "content": str(text)}:
                return [self._ids["<|assistant|>"], *self.completion(text)], True
            case {"role": "system" | "user" as role, "content": str(text)}:
                return list(self._turn(f"<|{role}|>", text)), False
            case {"role": "tool", "content": [*results]} if all(
                isinstance(result, str) for result in results
            ):
                return list(self._tool(results)), False
        raise InvalidFieldError(
            f"messages[{index}]",
            "needs role system, user or assistant with text, or role tool with a list of texts",
        )

    def _turn(self, tag: str, text: str) -> Iterator[int]:
        yield self._ids[tag]
        yield from self.encode_text(text)
        yield self.end_id

    def _tool(self, results: Sequence[str]) -> Iterator[int]:
        yield self._ids["<|tool|>"]
        for result in results:
            yield self._ids["<tool_response>"]
            yield from self.encode_text(result)
            yield self._ids["</tool_response>"]
        yield self.end_id


def _check_end(path: Path) -> None:
    """Refuse a tokenizer whose declared end of turn is another token than the layout's."""
    try:
        declared = json.loads(path.read_text("utf-8")).get("eos_token", END)
    except FileNotFoundError:
        return
    except (ValueError, AttributeError) as error:
        _refuse(path, f"not a tokenizer configuration: {error}")
    if isinstance(declared, dict):
        declared = declared.get("content")
    if declared not in {END, None}:
        _refuse(path, f"eos_token is {declared!r}, and turns end with {END}")


def _refuse(path: Path, what: str) -> NoReturn:
    raise UserError(
        Problem(
            reason="WrongTokenizer",
            what=what,
            where=str(path),
            fix="use the tokenizer that the model was trained with; the layout needs the special"
            f" tokens {' '.join(LAYOUT_TOKENS)}",
        )
    )
