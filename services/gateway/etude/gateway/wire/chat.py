"""OpenAI's chat completions: POST /v1/chat/completions."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
from etude.gateway.wire.protocol import Body, StreamWriter, WireProtocol, write_data

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "stop": ([], ""),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "verbosity": (),
    "prediction": (),
    "top_k": (0, -1),
    "min_p": (0,),
    "web_search_options": (),
    "modalities": (["text"],),
    "audio": (),
}
_MAX_SEED = (1 << 63) - 1


class ChatCompletions(WireProtocol):
    """Chat completions, also streamed, with tools."""

    keep_alive = b": keep-alive\n\n"

    @override
    def read_request(self, body: Body) -> TurnRequest:
        fields.refuse_unsupported(body, _UNSUPPORTED)
        listed = fields.read_list(body, "messages", most=fields.MAX_MESSAGES, is_required=True)
        options = body.get("stream_options") or {}
        choice = body.get("tool_choice") or "auto"
        if not isinstance(choice, str) or choice not in {"auto", "none"}:
            fields.refuse("tool_choice", "is neither auto nor none")
        return TurnRequest(
            messages=tuple(
                _read_message(fields.read_object(each, f"messages[{index}]"), f"messages[{index}]")
                for index, each in enumerate(listed)
            ),
            tools=_read_tools(body),
            may_call=choice == "auto",
            sampling=read_sampling(body, "max_completion_tokens", "max_tokens"),
            stream=fields.read_flag(body, "stream"),
            reports_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )

    @override
    def write_answer(self, model: str, turn: FinishedTurn) -> Mapping[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": turn.content or None}
        if turn.thinking:
            message["reasoning_content"] = turn.thinking
        if turn.calls:
            message["tool_calls"] = [_write_call(call) for call in turn.calls]
        elif not turn.content:
            message["content"] = ""
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": _finish_reason(turn),
        }
        return {
            "id": f"chatcmpl-{turn.turn_id}",
            "object": "chat.completion",
            "created": turn.created_s,
            "model": model,
            "system_fingerprint": turn.version,
            "choices": [choice],
            "usage": write_usage(turn),
        }

    @override
    def open_stream(self, model: str, request: TurnRequest) -> StreamWriter:
        return _ChatStream(model, reports_usage=request.reports_usage)

    @override
    def write_error(self, status: int, message: str) -> Mapping[str, object]:
        return write_openai_error(status, message)


def write_openai_error(status: int, message: str) -> Mapping[str, object]:
    """An error in the form of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def write_usage(turn: FinishedTurn) -> Mapping[str, object]:
    """Token counts in the form of OpenAI's completions."""
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": turn.thinking_tokens},
    }


def read_sampling(body: Body, *limits: str) -> SamplingOptions:
    """Read the sampling parameters of OpenAI's completions.

    Args:
        body: of the request.
        limits: fields of the token limit; the first that is given counts.

    Raises:
        InvalidFieldError: one is wrong.
    """
    counts = [fields.read_count(body, name, low=1, high=1 << 31) for name in limits]
    return SamplingOptions(
        max_tokens=next((count for count in counts if count is not None), None),
        temperature=fields.read_number(body, "temperature", 1.0, high=2),
        seed=fields.read_count(body, "seed", low=0, high=_MAX_SEED),
    )


def _read_message(message: Body, place: str) -> WireMessage:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        fields.refuse(f"{place}.role", f"is none of {', '.join(_ROLES)}")
    calls = tuple(_read_calls(message, place)) if role == "assistant" else ()
    content = message.get("content")
    if content is None and not calls and role != "assistant":
        fields.refuse(f"{place}.content", "is missing")
    call_id = fields.read_text(message, "tool_call_id") if role == "tool" else ""
    return WireMessage(role, read_content(content, f"{place}.content"), calls, call_id)


def read_content(content: object, place: str) -> str:
    """Read the text of a message: one text, or a list of parts with texts.

    Raises:
        InvalidFieldError: a part is no text, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fields.refuse(place, "is neither a text nor a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if not isinstance(text, str):
            fields.refuse(f"{place}[{index}]", "is no part with a text; images are not supported")
        texts.append(text)
    return "\n".join(texts)


def _read_calls(message: Body, place: str) -> Iterator[WireCall]:
    listed = message.get("tool_calls")
    if listed is not None and not isinstance(listed, list):
        fields.refuse(f"{place}.tool_calls", "is no list")
    for index, each in enumerate(listed or ()):
        at = f"{place}.tool_calls[{index}]"
        call = fields.read_object(each, at)
        function = fields.read_object(call.get("function"), f"{at}.function")
        yield WireCall(
            fields.read_text(call, "id"),
            fields.read_text(function, "name"),
            fields.read_arguments(function.get("arguments"), f"{at}.function.arguments"),
        )


def _read_tools(body: Body) -> tuple[Schema, ...]:
    tools: list[Schema] = []
    for index, each in enumerate(fields.read_list(body, "tools", most=fields.MAX_TOOLS)):
        tool = fields.read_object(each, f"tools[{index}]")
        if tool.get("type", "function") != "function":
            fields.refuse(f"tools[{index}].type", "is not function")
        function = fields.read_object(tool.get("function"), f"tools[{index}].function")
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def _write_call(call: WireCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _finish_reason(turn: FinishedTurn) -> str:
    if turn.is_cut:
        return "length"
    return "tool_calls" if turn.calls else "stop"


@dataclass(slots=True)
class _ChatStream(StreamWriter):
    model: str
    reports_usage: bool
    base: Mapping[str, object] | None = None

    def _chunk(self, delta: Mapping[str, object], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return write_data({**(self.base or {}), "choices": [choice]})

    @override
    def start(self, start: TurnStart) -> bytes:
        self.base = {
            "id": f"chatcmpl-{start.turn_id}",
            "object": "chat.completion.chunk",
            "created": start.created_s,
            "model": self.model,
        }
        return self._chunk({"role": "assistant", "content": ""})

    @override
    def write(self, piece: TextPiece) -> bytes:
        return self._chunk({"reasoning_content" if piece.is_thinking else "content": piece.text})

    @override
    def finish(self, turn: FinishedTurn) -> bytes:
        events = [
            self._chunk({"tool_calls": [{"index": index, **_write_call(call)}]})
            for index, call in enumerate(turn.calls)
        ]
        events.append(self._chunk({}, _finish_reason(turn)))
        if self.reports_usage:
            usage = {**(self.base or {}), "choices": [], "usage": write_usage(turn)}
            events.append(write_data(usage))
        return b"".join([*events, b"data: [DONE]\n\n"])

    @override
    def fail(self, status: int, message: str) -> bytes:
        return write_data(write_openai_error(status, message))
