"""How long a trainer waits for its store, and what it says meanwhile."""

import asyncio

import pytest

from etude.common.blobs import Deadlines
from etude.common.errors import StoreError
from etude.common.store_retry import (
    BELIEVED_S,
    LONGEST_PAUSE_S,
    StoreRefusal,
    StoreRetry,
)

HOURS_S = 6 * 3_600


class Away:
    """A store that answers after so many seconds, on a clock of its own."""

    def __init__(self, patience: StoreRetry, seconds: float) -> None:
        self.patience, self.left_s = patience, seconds
        self.said: set[str] = set()
        self.pauses: list[float] = []
        self.now_s = 0.0
        patience.refusal.clock = lambda: self.now_s

    async def sleep(self, seconds: float) -> None:
        self.left_s -= seconds
        self.now_s += seconds
        self.pauses.append(seconds)

    async def work(self) -> str:
        self.said.add(self.patience.problem)
        if self.left_s > 0:
            raise StoreError("the store is being moved")
        return "stored"


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Away:
    store = Away(StoreRetry(), HOURS_S)
    monkeypatch.setattr(asyncio, "sleep", store.sleep)
    return store


async def test_a_store_that_is_away_for_hours_is_waited_for(away: Away) -> None:
    assert await away.patience.retry("version 1.7", away.work) == "stored"
    assert sum(away.pauses) >= HOURS_S
    assert max(away.pauses) == LONGEST_PAUSE_S


async def test_what_the_store_said_is_told_for_as_long_as_it_is_away(away: Away) -> None:
    await away.patience.retry("version 1.7", away.work)
    assert away.said == {"", "the store is being moved"}
    assert away.patience.problem == ""


async def test_whoever_may_not_wait_gives_up_at_its_limit(away: Away) -> None:
    away.patience.limit_s = 60.0
    with pytest.raises(StoreError, match="being moved"):
        await away.patience.retry("the marks", away.work)
    assert 60.0 <= sum(away.pauses) < 60.0 + LONGEST_PAUSE_S


async def test_a_try_that_never_returns_is_no_wait_for_the_store_for_ever() -> None:
    now_s, tries = [0.0], 0
    patience = StoreRetry(refusal=StoreRefusal(lambda: now_s[0]))
    hangs = asyncio.Event()

    async def work() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise StoreError("slow down")
        hangs.set()
        await asyncio.Event().wait()

    trying = asyncio.create_task(patience.retry("version 1.7", work))
    await asyncio.wait_for(hangs.wait(), 10)
    now_s[0] = BELIEVED_S - 1
    assert patience.problem == "slow down"
    now_s[0] = BELIEVED_S + 1
    assert patience.problem == ""
    trying.cancel()


def test_a_refusal_is_believed_for_longer_than_two_of_an_outage_are_apart() -> None:
    call_s = Deadlines().retry_s + Deadlines().request_s
    assert 3 * (call_s + LONGEST_PAUSE_S) < BELIEVED_S
