"""The gateway as a process: TLS, probes, two on one port, and a drain that loses nothing."""

import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.support import pki
from tests.support.free_ports import reserve_port
from tests.support.gateway.served import MODEL, PlayedEngine

from etude.agent.chat import ChatFormat
from etude.common.blobs import open_store
from etude.common.rpc.server import Server
from etude.common.tls.identity import Identity
from etude.common.turns.turn_log import read_turns
from etude.v1 import inference_pb2_grpc

TOKENIZER = Path(__file__).parents[1] / "unit" / "agent" / "model"
START_S = 120
ASK: Any = [{"role": "user", "content": "Fix it."}]
LONG_TURN = "Every word of this turn is heard, although the gateway was told to stop."


def make_key() -> tuple[str, str]:
    """A key and its line, as a user makes them."""
    done = subprocess.run(
        [sys.executable, "-m", "etude.gateway.main", "key", "alice", "serve"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.strip(), done.stdout.strip()


@contextlib.contextmanager
def start_gateway(folder: Path, port: int, probe_port: int) -> Iterator["subprocess.Popen[bytes]"]:
    settings = {
        "ETUDE_GATEWAY_ROUTE": str(folder / "route.json"),
        "ETUDE_GATEWAY_KEYS": str(folder / "keys"),
        "ETUDE_GATEWAY_TLS": str(folder / "tls"),
        "ETUDE_GATEWAY_PROCESSES": "2",
        "ETUDE_SCRATCH": str(folder / "scratch"),
        "ETUDE_PORT": str(port),
        "ETUDE_PROBE_PORT": str(probe_port),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "etude.gateway.main"], env={**os.environ, **settings}
    )
    try:
        deadline_s = time.monotonic() + START_S
        while not is_ready(probe_port):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def is_ready(probe_port: int) -> bool:
    with contextlib.suppress(OSError):
        address = f"http://127.0.0.1:{probe_port}/readyz"
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    return False


@pytest.mark.smoke
async def test_a_stream_ends_and_is_recorded_although_the_gateway_is_told_to_stop(
    tmp_path: Path,
) -> None:
    chat = ChatFormat.load(TOKENIZER)
    engine = PlayedEngine(chat, lambda _: LONG_TURN, pause_s=0.1)
    server = Server([])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server.grpc_server)
    await server.start()
    key, line = await asyncio.to_thread(make_key)
    (tmp_path / "keys").write_text(f"{line} consent=v1\n")
    pki.write(tmp_path / "tls", pki.Authority().issue(Identity(domain="t", namespace="t")))
    store = (tmp_path / "store").as_uri()
    route = {
        "model": MODEL,
        "modelUri": TOKENIZER.as_uri(),
        "stable": [f"127.0.0.1:{server.port}"],
        "storage": {"uri": store},
        "recordUnencrypted": True,
    }
    (tmp_path / "route.json").write_text(json.dumps(route))
    port = reserve_port()
    with (
        start_gateway(tmp_path, port, reserve_port()) as process,
        start_gateway(tmp_path, port, reserve_port()) as other,
    ):
        trusted = ssl.create_default_context(cafile=tmp_path / "tls" / "ca.crt")
        trusted.check_hostname = False
        client = openai.AsyncOpenAI(
            base_url=f"https://127.0.0.1:{port}/v1",
            api_key=key,
            max_retries=0,
            http_client=httpx2.AsyncClient(verify=trusted, timeout=60),
        )
        stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
        text = ""
        async for chunk in stream:
            if not text:
                process.send_signal(signal.SIGTERM)
                other.send_signal(signal.SIGTERM)
            text += chunk.choices[0].delta.content or ""
        assert text == LONG_TURN
        assert await asyncio.to_thread(process.wait, 60) == 0
        assert await asyncio.to_thread(other.wait, 60) == 0
    (record,) = read_turns(open_store(store))
    assert [*record.token_ids] == chat.completion(LONG_TURN)
    await server.stop(0)
