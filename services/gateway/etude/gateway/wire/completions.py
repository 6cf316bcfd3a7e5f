"""OpenAI's text completions: POST /v1/completions."""

from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import override

from etude.gateway.turn_request import FinishedTurn, TextPiece, TurnRequest, TurnStart
from etude.gateway.wire import fields
from etude.gateway.wire.chat import read_sampling, write_openai_error, write_usage
from etude.gateway.wire.protocol import Body, StreamWriter, WireProtocol, write_data

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "stop": ([], ""),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (0,),
    "top_k": (0, -1),
    "min_p": (0,),
}
_MAX_TOKENS = 16
"""Of a request without a limit, as OpenAI's API has it."""


class TextCompletions(WireProtocol):
    """A text or tokens, continued as they are."""

    keep_alive = b": keep-alive\n\n"

    @override
    def read_request(self, body: Body) -> TurnRequest:
        fields.refuse_unsupported(body, _UNSUPPORTED)
        options = body.get("stream_options") or {}
        return TurnRequest(
            prompt=_read_prompt(body.get("prompt")),
            sampling=read_sampling({"max_tokens": _MAX_TOKENS, **body}, "max_tokens"),
            stream=fields.read_flag(body, "stream"),
            reports_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )

    @override
    def write_answer(self, model: str, turn: FinishedTurn) -> Mapping[str, object]:
        return {
            "id": f"cmpl-{turn.turn_id}",
            "object": "text_completion",
            "created": turn.created_s,
            "model": model,
            "system_fingerprint": turn.version,
            "choices": [_write_choice(turn.content, _finish_reason(turn))],
            "usage": write_usage(turn),
        }

    @override
    def open_stream(self, model: str, request: TurnRequest) -> StreamWriter:
        return _TextStream(model, reports_usage=request.reports_usage)

    @override
    def write_error(self, status: int, message: str) -> Mapping[str, object]:
        return write_openai_error(status, message)


def _read_prompt(prompt: object) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(
        type(token) is int and 0 <= token < 1 << 31 for token in prompt
    ):
        fields.refuse("prompt", "is neither one text nor one list of tokens")
    return tuple(prompt)


def _write_choice(text: str, finish: str | None) -> Mapping[str, object]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


def _finish_reason(turn: FinishedTurn) -> str:
    return "length" if turn.is_cut else "stop"


@dataclass(slots=True)
class _TextStream(StreamWriter):
    model: str
    reports_usage: bool
    base: Mapping[str, object] | None = None

    def _chunk(self, text: str, finish: str | None = None) -> bytes:
        return write_data({**(self.base or {}), "choices": [_write_choice(text, finish)]})

    @override
    def start(self, start: TurnStart) -> bytes:
        self.base = {
            "id": f"cmpl-{start.turn_id}",
            "object": "text_completion",
            "created": start.created_s,
            "model": self.model,
        }
        return b""

    @override
    def write(self, piece: TextPiece) -> bytes:
        return self._chunk(piece.text)

    @override
    def finish(self, turn: FinishedTurn) -> bytes:
        events = [self._chunk("", _finish_reason(turn))]
        if self.reports_usage:
            usage = {**(self.base or {}), "choices": [], "usage": write_usage(turn)}
            events.append(write_data(usage))
        return b"".join([*events, b"data: [DONE]\n\n"])

    @override
    def fail(self, status: int, message: str) -> bytes:
        return write_data(write_openai_error(status, message))
