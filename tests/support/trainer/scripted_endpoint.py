"""An endpoint of OpenAI's chat completions that says what it is told to, over real HTTP."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

Turn = Mapping[str, Any]
"""Message of an answer."""


def call_turn(name: str, arguments: str, *, text: str = "") -> Turn:
    """A turn with one call, its arguments as the model wrote them."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "call-1", "type": "function", "function": function}]
    return {"role": "assistant", "content": text or None, "tool_calls": calls}


READ = call_turn("read_file", '{"path": "a.py"}')
DONE: Turn = {"role": "assistant", "content": "Done."}


@dataclass
class ScriptedEndpoint:
    """Says the same turns in every conversation; refuses or garbles answers if told so."""

    turns: Sequence[Turn] = (READ, DONE)
    usage: bool = False
    """True if answers count their tokens: 7 a turn."""
    refusals: list[tuple[int, bytes]] = field(default_factory=list)
    """Status and body of the first answers."""
    refuse: Callable[[Mapping[str, Any]], tuple[int, bytes] | None] = lambda _: None
    """Status and body for a request, or None to answer it."""
    url: str = ""
    requests: list[Mapping[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def answer(self, body: Mapping[str, Any]) -> tuple[int, bytes]:
        self.requests.append(body)
        if self.refusals:
            return self.refusals.pop(0)
        if (refusal := self.refuse(body)) is not None:
            return refusal
        said = sum(each["role"] == "assistant" for each in body["messages"])
        turn = self.turns[said]
        finish = "tool_calls" if turn.get("tool_calls") else "stop"
        found: dict[str, Any] = {"choices": [{"message": turn, "finish_reason": finish}]}
        if self.usage:
            found["usage"] = {"prompt_tokens": 100 + 20 * said, "completion_tokens": 7}
        return 200, json.dumps(found).encode()


@contextmanager
def serve_endpoint() -> Iterator[ScriptedEndpoint]:
    """Serve an endpoint on the loopback."""
    endpoint = ScriptedEndpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            endpoint.keys.append(self.headers.get("authorization", ""))
            status, data = endpoint.answer(json.loads(self.rfile.read(size)))
            if not status:
                return  # the connection ends without an answer
            if self.path != "/v1/chat/completions":
                status = 404
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        @override
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()
