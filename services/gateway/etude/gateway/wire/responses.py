"""OpenAI's responses: POST /v1/responses. The client sends the whole conversation; none is stored.

Source: https://platform.openai.com/docs/api-reference/responses and …/responses-streaming.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from typing_extensions import override

from etude.gateway.turn_request import (
    FinishedTurn,
    Role,
    SamplingOptions,
    Schema,
    TextPiece,
    TurnRequest,
    TurnStart,
    WireCall,
    WireMessage,
)
from etude.gateway.wire import fields
from etude.gateway.wire.chat import write_openai_error
from etude.gateway.wire.protocol import Body, StreamWriter, WireProtocol, write_event

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "top_p": (1,),
    "top_logprobs": (0,),
    "text": ({}, {"format": {"type": "text"}}),
    "max_tool_calls": (),
    "parallel_tool_calls": (True,),
    "truncation": ("disabled",),
}


class Responses(WireProtocol):
    """Responses, also streamed, with functions."""

    keep_alive = b": keep-alive\n\n"

    @override
    def read_request(self, body: Body) -> TurnRequest:
        fields.refuse_unsupported(body, _UNSUPPORTED)
        choice = body.get("tool_choice") or "auto"
        if not isinstance(choice, str) or choice not in {"auto", "none"}:
            fields.refuse("tool_choice", "is neither auto nor none")
        reasoning = fields.read_object(body.get("reasoning") or {}, "reasoning")
        if reasoning.get("effort") is not None:
            fields.refuse("reasoning.effort", "is not supported")
        instructions = fields.read_text(body, "instructions", "")
        messages = [WireMessage("system", instructions)] if instructions else []
        return TurnRequest(
            messages=tuple(_join_turns([*messages, *_read_input(body.get("input"))])),
            tools=tuple(_read_tools(body)),
            may_call=choice == "auto",
            sampling=SamplingOptions(
                max_tokens=fields.read_count(body, "max_output_tokens", low=1, high=1 << 31),
                temperature=fields.read_number(body, "temperature", 1.0, high=2),
            ),
            stream=fields.read_flag(body, "stream"),
        )

    @override
    def write_answer(self, model: str, turn: FinishedTurn) -> Mapping[str, object]:
        return _write_response(model, turn, list(_write_items(turn)))

    @override
    def open_stream(self, model: str, request: TurnRequest) -> StreamWriter:
        return _ResponseStream(model)

    @override
    def write_error(self, status: int, message: str) -> Mapping[str, object]:
        return write_openai_error(status, message)


def _read_input(value: object) -> Iterator[WireMessage]:
    if isinstance(value, str):
        yield WireMessage("user", value)
        return
    if not isinstance(value, list) or len(value) > fields.MAX_MESSAGES:
        fields.refuse("input", f"is neither a text nor a list of at most {fields.MAX_MESSAGES}")
    for index, each in enumerate(value):
        place = f"input[{index}]"
        yield from _read_item(fields.read_object(each, place), place)


def _read_item(item: Body, place: str) -> Iterator[WireMessage]:
    match item.get("type", "message"):
        case "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                fields.refuse(f"{place}.role", f"is none of {', '.join(_ROLES)}")
            yield WireMessage(role, _read_content(item.get("content"), f"{place}.content"))
        case "function_call":
            arguments = fields.read_arguments(item.get("arguments"), f"{place}.arguments")
            name, call_id = fields.read_text(item, "name"), fields.read_text(item, "call_id")
            yield WireMessage("assistant", "", (WireCall(call_id, name, arguments),))
        case "function_call_output":
            output = _read_content(item.get("output"), f"{place}.output")
            yield WireMessage("tool", output, call_id=fields.read_text(item, "call_id"))
        case "reasoning":
            pass  # its tokens are kept, or it was another policy's
        case _:
            fields.refuse(f"{place}.type", "is not supported")


def _read_content(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fields.refuse(place, "is neither a text nor a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            fields.refuse(f"{place}[{index}]", "is no part with a text; images are not supported")
        texts.append(part["text"])
    return "\n".join(texts)


def _join_turns(messages: list[WireMessage]) -> Iterator[WireMessage]:
    """Join neighbouring items of the assistant to one turn: its text, then its calls."""
    pending: WireMessage | None = None
    for message in messages:
        if pending is not None and (message.role, pending.role) == ("assistant", "assistant"):
            texts = "\n".join(filter(None, [pending.content, message.content]))
            pending = pending._replace(content=texts, calls=pending.calls + message.calls)
            continue
        if pending is not None:
            yield pending
        pending = message
    if pending is not None:
        yield pending


def _read_tools(body: Body) -> Iterator[Schema]:
    for index, each in enumerate(fields.read_list(body, "tools", most=fields.MAX_TOOLS)):
        tool = fields.read_object(each, f"tools[{index}]")
        if tool.get("type") != "function":
            fields.refuse(f"tools[{index}].type", "is not function")
        parameters = tool.get("parameters") or {"type": "object", "properties": {}}
        function = {
            "name": fields.read_text(tool, "name"),
            "description": fields.read_text(tool, "description", ""),
            "parameters": fields.read_object(parameters, f"tools[{index}].parameters"),
        }
        yield {"type": "function", "function": function}


def _write_items(turn: FinishedTurn) -> Iterator[dict[str, object]]:
    if turn.thinking:
        yield _write_reasoning(turn.turn_id, turn.thinking)
    if turn.content or not turn.calls:
        yield _write_message(turn.turn_id, turn.content, is_done=True)
    for index, call in enumerate(turn.calls):
        yield _write_call(turn.turn_id, index, call, _encode_arguments(call))


def _write_reasoning(turn_id: str, text: str) -> dict[str, object]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "id": f"rs_{turn_id}", "summary": [], "content": content}


def _write_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": []}


def _write_message(turn_id: str, text: str, *, is_done: bool) -> dict[str, object]:
    return {
        "type": "message",
        "id": f"msg_{turn_id}",
        "role": "assistant",
        "status": "completed" if is_done else "in_progress",
        "content": [_write_part(text)] if is_done else [],
    }


def _encode_arguments(call: WireCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def _write_call(turn_id: str, index: int, call: WireCall, arguments: str) -> dict[str, object]:
    return {
        "type": "function_call",
        "id": f"fc_{turn_id}_{index}",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": arguments,
        "status": "completed" if arguments else "in_progress",
    }


def _write_response(
    model: str, turn: FinishedTurn | TurnStart, output: list[dict[str, object]]
) -> dict[str, object]:
    response: dict[str, object] = {
        "id": f"resp_{turn.turn_id}",
        "object": "response",
        "created_at": turn.created_s,
        "status": "in_progress",
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "usage": None,
    }
    if isinstance(turn, FinishedTurn):
        response["status"] = "incomplete" if turn.is_cut else "completed"
        response["incomplete_details"] = {"reason": "max_output_tokens"} if turn.is_cut else None
        response["usage"] = {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": turn.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": turn.thinking_tokens},
            "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        }
    return response


@dataclass(slots=True)
class _ResponseStream(StreamWriter):
    """Items one after the other, each opened and closed."""

    model: str
    turn_id: str = ""
    number: int = -1
    """Of the last event."""
    index: int = -1
    """Of the item that is open or was the last."""
    kind: str = ""
    """Of the open item; empty if none is."""
    text: str = ""
    """Of the open item."""

    def _event(self, kind: str, **values: object) -> bytes:
        self.number += 1
        name = f"response.{kind}"
        return write_event(name, {"type": name, "sequence_number": self.number, **values})

    @override
    def start(self, start: TurnStart) -> bytes:
        self.turn_id = start.turn_id
        response = _write_response(self.model, start, [])
        return self._event("created", response=response) + self._event(
            "in_progress", response=response
        )

    @override
    def write(self, piece: TextPiece) -> bytes:
        kind = "reasoning" if piece.is_thinking else "message"
        opening = b"" if kind == self.kind else self._close() + self._open(kind)
        self.text += piece.text
        name = "reasoning_text.delta" if piece.is_thinking else "output_text.delta"
        logprobs: dict[str, object] = {} if piece.is_thinking else {"logprobs": []}
        return opening + self._event(name, **self._place(), delta=piece.text, **logprobs)

    @override
    def finish(self, turn: FinishedTurn) -> bytes:
        events = [self._close()]
        if self.index < 0 and not turn.calls:
            events += [self._open("message"), self._close()]
        for index, call in enumerate(turn.calls):
            self.index += 1
            arguments = _encode_arguments(call)
            item = _write_call(self.turn_id, index, call, arguments)
            begun = _write_call(self.turn_id, index, call, "")
            place = {"item_id": item["id"], "output_index": self.index}
            events += [
                self._event("output_item.added", output_index=self.index, item=begun),
                self._event("function_call_arguments.delta", **place, delta=arguments),
                self._event(
                    "function_call_arguments.done", **place, name=call.name, arguments=arguments
                ),
                self._event("output_item.done", output_index=self.index, item=item),
            ]
        response = _write_response(self.model, turn, list(_write_items(turn)))
        name = "incomplete" if turn.is_cut else "completed"
        return b"".join([*events, self._event(name, response=response)])

    @override
    def fail(self, status: int, message: str) -> bytes:
        self.number += 1
        error = {"code": str(status), "message": message, "param": None}
        value = {"type": "error", "sequence_number": self.number, **error}
        return write_event("error", value)

    def _place(self) -> dict[str, object]:
        prefix = "rs" if self.kind == "reasoning" else "msg"
        return {
            "item_id": f"{prefix}_{self.turn_id}",
            "output_index": self.index,
            "content_index": 0,
        }

    def _item(self, *, is_done: bool) -> dict[str, object]:
        if self.kind == "reasoning":
            return _write_reasoning(self.turn_id, self.text)
        return _write_message(self.turn_id, self.text, is_done=is_done)

    def _open(self, kind: str) -> bytes:
        self.index, self.kind, self.text = self.index + 1, kind, ""
        item = self._item(is_done=False)
        opened = self._event("output_item.added", output_index=self.index, item=item)
        if kind == "reasoning":
            return opened
        part = self._event("content_part.added", **self._place(), part=_write_part(""))
        return opened + part

    def _close(self) -> bytes:
        if not self.kind:
            return b""
        place, item = self._place(), self._item(is_done=True)
        if self.kind == "reasoning":
            events = self._event("reasoning_text.done", **place, text=self.text)
        else:
            events = self._event("output_text.done", **place, text=self.text, logprobs=[])
            part = _write_part(self.text)
            events += self._event("content_part.done", **place, part=part)
        events += self._event("output_item.done", output_index=self.index, item=item)
        self.kind = ""
        return events
