"""Windows of the service as a process: closed once under kill -9, and sound by the audit."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest
from tests.support.feedback import events as examples
from tests.support.feedback.process import FeedbackProcess
from tests.support.feedback.turns import serve_version, turn, write_turns

from etude.common.blobs import Store, open_store
from etude.common.feedback import windows
from etude.common.turns import turn_log

NUM_USERS = 60
RULES = {
    "ETUDE_FEEDBACK_HORIZON_S": "1",
    "ETUDE_FEEDBACK_WINDOW_ROLLOUTS": "20",
    "ETUDE_FEEDBACK_WINDOW_MIN_ROLLOUTS": "20",
    "ETUDE_FEEDBACK_WINDOW_AGE_S": "1",
}


async def send_events(service: FeedbackProcess) -> None:
    events = []
    for number in range(NUM_USERS):
        user = f"u{number}"
        events += [
            examples.event("edit_applied", id=f"{user}-1", user=user),
            examples.event(
                "edit_observed", id=f"{user}-2", user=user, ageS=1.0, numAliveLines=number % 3
            ),
        ]
    headers = service.headers | {"content-type": "application/cloudevents-batch+json"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        answer = await client.post(f"{service.url}/v1/events", content=json.dumps(events))
    assert {each["status"] for each in answer.json()["results"]} == {202}


async def count_windows(store: Store, number: int) -> None:
    async with asyncio.timeout(60):
        while len([*windows.list_windows(store)]) < number:  # noqa: ASYNC110 - a store tells nothing
            await asyncio.sleep(0.05)


@pytest.mark.smoke
async def test_windows_are_closed_once_under_kills_and_pass_the_audit(tmp_path: Path) -> None:
    service = FeedbackProcess.prepare(tmp_path)
    service.settings = RULES
    store = open_store((tmp_path / "ledger").as_uri())
    serve_version(store)
    await service.start()
    await send_events(service)
    now_ms = time.time_ns() // 1_000_000
    write_turns(store, [turn(f"u{n}", started_ms=now_ms) for n in range(NUM_USERS)])
    for closed in (1, 2):
        await count_windows(store, closed)
        await service.stop(signal.SIGKILL)
        await service.start()
    await count_windows(store, 3)
    assert await service.stop(signal.SIGTERM) == 0
    assert b"served rollouts: 60 = 60 trained + 0 waiting + 0 masked" in await audit(service)


async def audit(service: FeedbackProcess) -> bytes:
    """Run the audit; returns what it prints, if it finds nothing."""
    command = (sys.executable, "-m", "etude.feedback.main", "audit")
    process = await asyncio.create_subprocess_exec(
        *command, env=service.env, stdout=asyncio.subprocess.PIPE
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told
    return told


async def test_old_turns_are_removed_and_the_audit_tells_them_from_lost_ones(
    tmp_path: Path,
) -> None:
    service = FeedbackProcess.prepare(tmp_path)
    service.settings = RULES
    store = open_store((tmp_path / "ledger").as_uri())
    serve_version(store)
    now_s = time.time()
    old_s = int(now_s) - 2 * 86_400
    write_turns(store, [turn(f"u{n}", started_ms=1_000 * old_s) for n in range(40)])
    os.utime(tmp_path / "ledger" / turn_log.segment_key("w", 0), (old_s, old_s))
    write_turns(store, [turn(f"u{n}", started_ms=int(1_000 * now_s)) for n in range(40, 60)])
    await service.start()
    await send_events(service)
    await count_windows(store, 3)
    assert await service.stop(signal.SIGTERM) == 0
    service.settings = RULES | {"ETUDE_FEEDBACK_TURN_RETENTION_S": str(10 + 1 + 86_400)}
    await service.start()
    async with asyncio.timeout(60):
        while len([*store.list(turn_log.PREFIX)]) > 1:  # noqa: ASYNC110 - a store tells nothing
            await asyncio.sleep(0.05)
    assert await service.stop(signal.SIGTERM) == 0
    assert [each.user for each in turn_log.read_turns(store)] == [f"u{n}" for n in range(40, 60)]
    told = await audit(service)
    assert b"served rollouts: 60 = 60 trained + 0 waiting + 0 masked" in told
    assert b"40 rollouts of windows" in told
    store.delete([turn_log.segment_key("w", 40)])
    with pytest.raises(AssertionError, match="which has no turn"):
        await audit(service)
