"""Liveness, readiness and metrics over HTTP."""

import asyncio
import urllib.error
import urllib.request

from etude.common.probes import Probes


async def fetch(port: int, path: str) -> tuple[int, bytes]:
    def call() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    return await asyncio.to_thread(call)


async def test_a_process_is_alive_before_it_is_ready() -> None:
    probes = Probes(0)
    await probes.start()
    try:
        assert (await fetch(probes.port, "/livez"))[0] == 200
        assert (await fetch(probes.port, "/readyz"))[0] == 503
        probes.ready = True
        assert (await fetch(probes.port, "/readyz"))[0] == 200
        assert (await fetch(probes.port, "/nothing"))[0] == 404
        status, body = await fetch(probes.port, "/metrics")
        assert status == 200
        assert b"python_info" in body
    finally:
        await probes.stop()


async def test_a_prober_that_talks_nonsense_does_no_harm() -> None:
    probes = Probes(0)
    await probes.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", probes.port)
        writer.write(b"\x00\r\n\r\n")
        await writer.drain()
        assert b"400" in await reader.read()
        writer.close()
        assert (await fetch(probes.port, "/livez"))[0] == 200
    finally:
        await probes.stop()
