"""Messages of a conversation, in the forms that datasets hold and templates read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from etude.agent.tool_messages import RenderedMessage
from etude.common.errors import InvalidFieldError

MAX_MESSAGES = 10_000
"""Longest conversation that is rendered."""


_ROLES = frozenset({"system", "user", "assistant", "tool"})


class Message(TypedDict):
    """One turn; a tool turn's content may list its results in call order."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Sequence[str]
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[RenderedMessage]:
    """Check the messages of a dataset; a tool turn becomes one message for each result.

    Raises:
        InvalidFieldError: a message has an unknown role or the wrong kind of content, or there
            are too many.
    """
    if len(messages) > MAX_MESSAGES:
        what = f"has {len(messages)} messages; at most {MAX_MESSAGES} can be rendered"
        raise InvalidFieldError("messages", what)
    read: list[RenderedMessage] = []
    for index, message in enumerate(messages):
        read += _read(message, index)
    return read


def _read(message: Mapping[str, Any], index: int) -> Iterator[RenderedMessage]:
    if not isinstance(message, Mapping):
        raise InvalidFieldError(f"messages[{index}]", "is no object")
    # Beside calls, content is often null.
    message = {key: value for key, value in message.items() if value is not None}
    content, role = message.get("content"), message.get("role")
    is_known = isinstance(role, str) and role in _ROLES
    if isinstance(content, str) and is_known and "tool_calls" not in message:
        yield message
        return
    match message:
        case {"role": "tool", "content": [*results]} if all(
            isinstance(result, str) for result in results
        ):
            for result in results:
                yield {**message, "content": result}
        case {"role": "assistant", "tool_calls": [*calls]} if all(
            isinstance(call, Mapping) for call in calls
        ) and isinstance(message.get("content", ""), str):
            yield {"content": "", **message}
        case _:
            raise InvalidFieldError(
                f"messages[{index}]",
                "needs role system, user, assistant or tool with text, role tool with a list of"
                " texts, or role assistant with tool_calls",
            )


def map_texts(value: object, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - JSON
    """A JSON value with each of its texts changed, keys of objects too: a call's are foreign."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): map_texts(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(each, change) for each in value]
    return value


def texts_of(messages: Sequence[RenderedMessage]) -> Iterator[str]:
    """All texts of messages."""
    for message in messages:
        for key, value in message.items():
            if isinstance(value, str):
                yield value
            elif key != "role":
                yield from _texts_of(value)


def _texts_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _texts_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_of(each)
