"""How many names one environment may have looked up at a time, and how long an answer is kept."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from tests.support.environments.scripted_network import FixedResolver, RedirectingConnector
from tests.support.vm import guests
from typing_extensions import override

from etude.envserver.egress.upstream import (
    HostLookups,
    Resolver,
    UnreachableError,
    Upstream,
    UpstreamTarget,
)

HOSTS = [f"h{number}.example.com" for number in range(6)]


@dataclass(slots=True)
class Silent(Resolver):
    """Name servers that say nothing until they are let."""

    answers: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[str] = field(default_factory=list)

    @override
    async def addresses(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        await self.answers.wait()
        return ["1.1.1.1"]


async def test_one_environment_takes_two_threads_and_leaves_the_others() -> None:
    silent, mine, theirs = Silent(), HostLookups(), HostLookups()
    waiting = [asyncio.create_task(mine.addresses(silent, host)) for host in HOSTS]
    await guests.until(lambda: len(silent.asked) == 2)

    other = asyncio.create_task(theirs.addresses(silent, "other.example.com"))
    await guests.until(lambda: "other.example.com" in silent.asked)

    assert silent.asked == [*HOSTS[:2], "other.example.com"]
    silent.answers.set()
    assert await asyncio.gather(*waiting, other) == [("1.1.1.1",)] * 7


async def test_a_lookup_that_nobody_waits_for_any_more_is_still_under_way() -> None:
    silent, lookups = Silent(), HostLookups()
    given_up = [asyncio.create_task(lookups.addresses(silent, host)) for host in HOSTS[:2]]
    await guests.until(lambda: len(silent.asked) == 2)
    for task in given_up:
        task.cancel()
    await asyncio.wait(given_up)

    third = asyncio.create_task(lookups.addresses(silent, HOSTS[2]))
    await asyncio.sleep(0.02)
    assert silent.asked == HOSTS[:2]

    silent.answers.set()
    assert await third == ("1.1.1.1",)


async def test_connections_to_the_same_host_share_a_lookup() -> None:
    silent, lookups = Silent(), HostLookups()
    waiting = [asyncio.create_task(lookups.addresses(silent, HOSTS[0])) for _ in range(5)]
    await guests.until(lambda: bool(silent.asked))
    silent.answers.set()

    assert await asyncio.gather(*waiting) == [("1.1.1.1",)] * 5
    assert silent.asked == HOSTS[:1]


async def test_an_answer_is_kept_for_a_while_and_no_longer() -> None:
    names = FixedResolver({"a.example.com": [["1.1.1.1"], ["8.8.8.8"]]})
    kept, forgotten = HostLookups(), HostLookups(kept_s=0.0)

    assert [await kept.addresses(names, "a.example.com") for _ in range(2)] == [("1.1.1.1",)] * 2
    assert await forgotten.addresses(names, "a.example.com") == ("8.8.8.8",)
    assert names.asked == ["a.example.com"] * 2


async def test_a_failure_is_asked_about_again() -> None:
    names, lookups = FixedResolver({}), HostLookups()
    for _ in range(3):
        with pytest.raises(socket.gaierror):
            await lookups.addresses(names, "a.example.com")
    assert not lookups.slots.locked()


async def test_an_error_without_words_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.envserver.egress.upstream.LOOKUP_S", 0.01)
    upstream = Upstream(Silent(), RedirectingConnector({}))
    with pytest.raises(UnreachableError, match="cannot be looked up: TimeoutError"):
        await upstream.connect(UpstreamTarget("a.example.com", 443, is_tls=False), HostLookups())
