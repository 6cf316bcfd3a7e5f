"""The feedback service as a process: killed, started again, taken over."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.support.feedback import events as examples
from tests.support.feedback.process import RETRY_S, FeedbackProcess
from tests.support.free_ports import reserve_port

BATCHES, EVENTS = 12, 5


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[FeedbackProcess]:
    service = FeedbackProcess.prepare(tmp_path)
    await service.start()
    yield service
    if service.process is not None and service.process.returncode is None:
        await service.stop(signal.SIGKILL)


async def send(service: FeedbackProcess, number: int) -> None:
    """Send a batch until it is acknowledged."""
    names = [f"{number}-{position}" for position in range(EVENTS)]
    body = json.dumps([examples.event(id=name, user=f"u{number % 3}") for name in names])
    headers = service.headers | {"content-type": "application/cloudevents-batch+json"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        while True:
            try:
                answer = await client.post(f"{service.url}/v1/events", content=body)
                assert {each["status"] for each in answer.json()["results"]} <= {200, 202}
            except httpx.TransportError:
                await asyncio.sleep(RETRY_S)
            else:
                return


@pytest.mark.smoke
async def test_events_are_there_once_after_kills_under_load(service: FeedbackProcess) -> None:
    load = [asyncio.create_task(send(service, number)) for number in range(BATCHES)]
    for _ in range(2):
        await asyncio.wait(load, return_when=asyncio.FIRST_COMPLETED)
        await service.stop(signal.SIGKILL)
        await service.start()
        load.append(asyncio.create_task(send(service, len(load))))
    await asyncio.gather(*load)
    expected = sorted(f"{b}-{e}" for b in range(len(load)) for e in range(EVENTS))
    assert sorted(await service.export(page=7)) == expected
    assert await service.stop(signal.SIGTERM) == 0


async def test_a_second_service_takes_the_ledger_over(
    service: FeedbackProcess, tmp_path: Path
) -> None:
    await send(service, 1)
    second = FeedbackProcess(tmp_path, reserve_port(), service.key)
    await second.start()
    try:
        await send(second, 2)
        assert service.process is not None
        refused = asyncio.create_task(send(service, 3))
        _, told = await asyncio.wait_for(service.process.communicate(), 60)
        refused.cancel()
        assert service.process.returncode == 1
        assert b"epoch 2 was opened" in told
        assert b"Traceback" not in told
        assert {name.partition("-")[0] for name in await second.export()} == {"1", "2"}
    finally:
        await second.stop(signal.SIGKILL)


async def test_a_service_waits_for_a_store_that_is_away_and_ends_when_told(tmp_path: Path) -> None:
    service = FeedbackProcess.prepare(tmp_path)
    access = {f"AWS_{name}": "x" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}
    env = service.env | {
        "ETUDE_FEEDBACK_STORE": "s3://bucket/ledger",
        "ETUDE_FEEDBACK_KEY_STORE": "s3://bucket/keys",
        "ETUDE_FEEDBACK_STORE_ENDPOINT": f"http://127.0.0.1:{reserve_port()}",
        **access,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "etude.feedback.main"), env=env, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    line = (await process.stderr.readline()).decode()
    while "opening the ledger failed and is retried: s3://bucket/ledger" not in line:
        assert line, "it ended"
        line = (await process.stderr.readline()).decode()
    process.send_signal(signal.SIGTERM)
    _, rest = await process.communicate()
    assert process.returncode == 0
    assert b"Traceback" not in rest
