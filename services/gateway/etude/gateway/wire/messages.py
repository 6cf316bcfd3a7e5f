"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens.

Source: https://docs.anthropic.com/en/api/messages and …/messages-streaming.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from etude.gateway.turn_request import (
    FinishedTurn,
    SamplingOptions,
    Schema,
    TextPiece,
    TurnRequest,
    TurnStart,
    WireCall,
    WireMessage,
)
from etude.gateway.wire import fields
from etude.gateway.wire.protocol import Body, StreamWriter, WireProtocol, write_event

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "stop_sequences": ([],),
    "top_p": (1,),
    "top_k": (0, -1),
    "mcp_servers": ([],),
    "container": (),
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
    "output_format": ({"type": "text"},),
    "output_config": ({},),
}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Messages(WireProtocol):
    """Messages, also streamed, with tools."""

    keep_alive = write_event("ping", {"type": "ping"})

    @override
    def read_request(self, body: Body) -> TurnRequest:
        fields.refuse_unsupported(body, _UNSUPPORTED)
        choice = fields.read_object(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
        if choice.get("type") not in {"auto", "none"}:
            fields.refuse("tool_choice.type", "is neither auto nor none")
        if choice.get("disable_parallel_tool_use"):
            fields.refuse("tool_choice.disable_parallel_tool_use", "is not supported")
        system = _read_text(body.get("system") or "", "system")
        messages = [WireMessage("system", system)] if system else []
        listed = fields.read_list(body, "messages", most=fields.MAX_MESSAGES, is_required=True)
        for index, each in enumerate(listed):
            place = f"messages[{index}]"
            messages += _read_message(fields.read_object(each, place), place)
        return TurnRequest(
            messages=tuple(_join_users(messages)),
            tools=tuple(_read_tools(body)),
            may_call=choice["type"] == "auto",
            sampling=SamplingOptions(
                max_tokens=fields.read_count(body, "max_tokens", low=1, high=1 << 31),
                temperature=fields.read_number(body, "temperature", 1.0, high=1),
            ),
            stream=fields.read_flag(body, "stream"),
        )

    @override
    def write_answer(self, model: str, turn: FinishedTurn) -> Mapping[str, object]:
        content: list[Mapping[str, object]] = []
        if turn.thinking:
            content.append({"type": "thinking", "thinking": turn.thinking, "signature": ""})
        if turn.content or not turn.calls:
            content.append({"type": "text", "text": turn.content})
        content += [_write_call(call, call.arguments) for call in turn.calls]
        return {
            **_write_head(turn.turn_id, model, turn.prompt_tokens),
            "content": content,
            "stop_reason": _stop_reason(turn),
            "usage": {
                "input_tokens": turn.prompt_tokens,
                "output_tokens": turn.completion_tokens,
            },
        }

    @override
    def open_stream(self, model: str, request: TurnRequest) -> StreamWriter:
        return _MessageStream(model)

    @override
    def write_error(self, status: int, message: str) -> Mapping[str, object]:
        kind = _ERRORS.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


def _read_text(content: object, place: str) -> str:
    """Read a text, or a list of blocks of text.

    Raises:
        InvalidFieldError: a block is no text, such as an image.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fields.refuse(place, "is neither a text nor a list of blocks")
    texts: list[str] = []
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("text"), str):
            fields.refuse(f"{place}[{index}]", "is no text; images are not supported")
        texts.append(block["text"])
    return "\n".join(texts)


@dataclass(slots=True)
class _Blocks:
    """Contents of one message by their kind."""

    texts: list[str] = field(default_factory=list)
    calls: list[WireCall] = field(default_factory=list)
    results: list[WireMessage] = field(default_factory=list)

    def add(self, block: Body, role: str, place: str) -> None:
        """Add one block.

        Raises:
            InvalidFieldError: the role has no such blocks.
        """
        match block.get("type"), role:
            case "text", _:
                self.texts.append(fields.read_text(block, "text"))
            case "tool_result", "user":
                result = _read_text(block.get("content") or "", f"{place}.content")
                call_id = fields.read_text(block, "tool_use_id")
                self.results.append(WireMessage("tool", result, call_id=call_id))
            case "tool_use", "assistant":
                arguments = fields.read_object(block.get("input"), f"{place}.input")
                name = fields.read_text(block, "name")
                self.calls.append(WireCall(fields.read_text(block, "id"), name, arguments))
            case (("thinking" | "redacted_thinking"), "assistant"):
                pass  # its tokens are kept, or it was another policy's
            case _:
                fields.refuse(f"{place}.type", "is not supported")


def _read_message(message: Body, place: str) -> Iterator[WireMessage]:
    """Read one message; results of tools become messages of their own.

    Raises:
        InvalidFieldError: a block is of another kind.
    """
    role = message.get("role")
    if role not in {"user", "assistant"}:
        fields.refuse(f"{place}.role", "is neither user nor assistant")
    content = message.get("content")
    listed = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(listed, list):
        fields.refuse(f"{place}.content", "is neither a text nor a list of blocks")
    blocks = _Blocks()
    for index, each in enumerate(listed):
        at = f"{place}.content[{index}]"
        blocks.add(fields.read_object(each, at), role, at)
    yield from blocks.results
    text = "\n".join(blocks.texts)
    if role == "assistant":
        yield WireMessage("assistant", text, tuple(blocks.calls))
    elif blocks.texts:
        yield WireMessage("user", text)


def _join_users(messages: list[WireMessage]) -> Iterator[WireMessage]:
    """Join neighbouring messages of the user, as Anthropic's API does."""
    pending: WireMessage | None = None
    for message in messages:
        if pending is not None and (message.role, pending.role) == ("user", "user"):
            pending = pending._replace(content=f"{pending.content}\n\n{message.content}")
            continue
        if pending is not None:
            yield pending
        pending = message
    if pending is not None:
        yield pending


def _read_tools(body: Body) -> Iterator[Schema]:
    for index, each in enumerate(fields.read_list(body, "tools", most=fields.MAX_TOOLS)):
        tool = fields.read_object(each, f"tools[{index}]")
        if tool.get("type", "custom") not in {"custom", None}:
            fields.refuse(f"tools[{index}].type", "is a tool of Anthropic's servers")
        function = {
            "name": fields.read_text(tool, "name"),
            "description": fields.read_text(tool, "description", ""),
            "parameters": fields.read_object(
                tool.get("input_schema"), f"tools[{index}].input_schema"
            ),
        }
        yield {"type": "function", "function": function}


def _write_head(turn_id: str, model: str, prompt_tokens: int) -> dict[str, object]:
    return {
        "id": f"msg_{turn_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
    }


def _write_call(call: WireCall, arguments: Mapping[str, object]) -> Mapping[str, object]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}


def _stop_reason(turn: FinishedTurn) -> str:
    if turn.is_cut:
        return "max_tokens"
    return "tool_use" if turn.calls else "end_turn"


@dataclass(slots=True)
class _MessageStream(StreamWriter):
    """Blocks one after the other, each opened and closed."""

    model: str
    index: int = -1
    """Of the block that is open or was the last."""
    kind: str = ""
    """Of the open block; empty if none is."""

    @override
    def start(self, start: TurnStart) -> bytes:
        message = _write_head(start.turn_id, self.model, start.prompt_tokens)
        return write_event("message_start", {"type": "message_start", "message": message})

    @override
    def write(self, piece: TextPiece) -> bytes:
        kind = "thinking" if piece.is_thinking else "text"
        opening = b""
        if kind != self.kind:
            empty = {"type": kind, kind: ""} | ({"signature": ""} if piece.is_thinking else {})
            opening = self._close() + self._open(kind, empty)
        return opening + self._delta({"type": f"{kind}_delta", kind: piece.text})

    @override
    def finish(self, turn: FinishedTurn) -> bytes:
        events = [self._close()]
        if self.index < 0 and not turn.calls:
            events += [self._open("text", {"type": "text", "text": ""}), self._close()]
        for call in turn.calls:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            events += [
                self._open("tool_use", _write_call(call, {})),
                self._delta({"type": "input_json_delta", "partial_json": arguments}),
                self._close(),
            ]
        delta = {"stop_reason": _stop_reason(turn), "stop_sequence": None}
        usage = {"output_tokens": turn.completion_tokens}
        changed = {"type": "message_delta", "delta": delta, "usage": usage}
        events.append(write_event("message_delta", changed))
        return b"".join([*events, write_event("message_stop", {"type": "message_stop"})])

    @override
    def fail(self, status: int, message: str) -> bytes:
        return write_event("error", Messages().write_error(status, message))

    def _open(self, kind: str, block: Mapping[str, object]) -> bytes:
        self.index, self.kind = self.index + 1, kind
        started = {"type": "content_block_start", "index": self.index, "content_block": block}
        return write_event("content_block_start", started)

    def _delta(self, delta: Mapping[str, object]) -> bytes:
        changed = {"type": "content_block_delta", "index": self.index, "delta": delta}
        return write_event("content_block_delta", changed)

    def _close(self) -> bytes:
        if not self.kind:
            return b""
        self.kind = ""
        stopped = {"type": "content_block_stop", "index": self.index}
        return write_event("content_block_stop", stopped)
