"""Requests to a feedback service over TLS, to a real server."""

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.feedback.relays import Certificates
from typing_extensions import override

from etude.common.feedback.http_exchange import BATCH_TYPE, FeedbackHttp, HttpAnswer

BUSY = "/api/v1/busy"


class Handler(BaseHTTPRequestHandler):
    """Tells what it was asked, and to come later or elsewhere."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        self.send_response(503 if self.path == BUSY else 302)
        self.send_header("retry-after", "7" if self.path == BUSY else "soon")
        self.send_header("location", "http://127.0.0.1:1/other")
        self.end_headers()
        words = (self.command, self.headers["authorization"], self.headers.get("content-type", ""))
        self.wfile.write(" ".join(words).encode() + b" " + body)

    def do_POST(self) -> None:
        self.do_GET()

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("tls") / "files")


@pytest.fixture(scope="module")
def url(tls: Certificates) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.both)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}/api/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_key_goes_to_a_server_that_a_trusted_authority_names(
    url: str, tls: Certificates
) -> None:
    http = FeedbackHttp(url, "secret", tls.authority)
    asked = b"POST Bearer secret application/cloudevents-batch+json []"
    assert http.post("/v1/busy", BATCH_TYPE, b"[]") == HttpAnswer(503, asked, 7.0)
    assert "secret" not in repr(http)


def test_a_redirect_is_an_answer_and_nothing_is_sent_there(url: str, tls: Certificates) -> None:
    answer = FeedbackHttp(url, "secret", tls.authority).get("/v1/moved")
    assert answer == HttpAnswer(302, b"GET Bearer secret  ", 0.0)


def test_a_server_of_another_authority_gets_no_request(url: str, tmp_path: Path) -> None:
    other = Certificates.make(tmp_path / "other")
    for trusted in (other.authority, None):
        with pytest.raises(OSError, match="certificate verify failed"):
            FeedbackHttp(url, "secret", trusted).get("/v1/busy")
