"""Hostile guests of a live node, and a hostile host at the guest's agents."""

import asyncio
from pathlib import Path

import pytest
from tests.harness.fuzz import agents, live
from tests.support.vm import guests


def test_a_host_takes_whatever_its_guests_send_and_serves_the_next_lease(tmp_path: Path) -> None:
    siege = asyncio.run(live.besieged(tmp_path, 1, 5_000))

    assert siege.counts.frames >= 5_000
    assert (siege.counts.crashes, siege.counts.hangs) == (0, 0), siege.counts.findings
    assert siege.answers["canary: Replaced b (0 bytes)."] == 1


@pytest.mark.parametrize("agent", guests.AGENTS)
def test_an_agent_takes_whatever_its_host_sends_and_answers_the_next_reset(agent: str) -> None:
    counts = asyncio.run(agents.run(1, 5_000, agent))

    assert counts.frames >= 5_000
    assert (counts.crashes, counts.hangs) == (0, 0), counts.findings
