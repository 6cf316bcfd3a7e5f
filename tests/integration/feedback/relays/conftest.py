"""A service, and relays beside it that end with the test."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.feedback.process import FeedbackProcess
from tests.support.feedback.relays import Relay


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[FeedbackProcess]:
    service = FeedbackProcess.prepare(tmp_path)
    await service.start()
    yield service
    assert service.process is not None
    if service.process.returncode is None:
        await service.stop(signal.SIGKILL)


@pytest.fixture
async def relays() -> AsyncIterator[list[Relay]]:
    relays: list[Relay] = []
    yield relays
    for relay in relays:
        await relay.stop(signal.SIGKILL)
