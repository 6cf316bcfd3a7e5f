"""kill -9 at every write, and two services at once: each rollout is in one window, or waits."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from blake3 import blake3
from tests.support.feedback import events as examples
from tests.support.feedback.failing_store import KilledError, KilledStore, KillPoint
from tests.support.feedback.lives import NOW_MS, SECRET, SERVER, Stores, living
from tests.support.feedback.turns import serve_version, turn, write_turns
from typing_extensions import override

from etude.common.blobs import MemoryStore, Store
from etude.common.errors import FencedError
from etude.common.feedback import windows
from etude.common.turns.turn_log import identify_rollout
from etude.feedback.ledger.ledger import open_ledger
from etude.feedback.windows.builder import WindowBuilder
from etude.feedback.windows.settings import WindowRules

RULES = WindowRules(num_rollouts=3, min_rollouts=2, max_age_s=500, horizon_s=100)
SETTLED_MS = NOW_MS + 2_000_000
USERS = ("a", "b", "c", "d", "e", "f", "gone")


async def prepare() -> Stores:
    """Seven users with a rollout, of whom one does not consent any more."""
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in USERS:
            await intake.take([examples.encoded("shown", id=user, user=user)], SERVER)
        later = "2026-11-01T09:00:00Z"
        await intake.take(
            [examples.encoded(id="no", user="gone", granted=False, decided=later)], SERVER
        )
    write_turns(stores.ledger, [turn(user, started_ms=NOW_MS) for user in USERS])
    return stores


def build(store: Store, keys: Store, *, now_ms: int = SETTLED_MS) -> WindowBuilder:
    ledger = open_ledger(store, keys, SECRET, uid="test", holder="test")
    return WindowBuilder(ledger, RULES, clock_ms=lambda: now_ms)


def check(store: Store) -> Counter[str]:
    """Check all windows; returns how often each rollout is trained or excluded."""
    found: Counter[str] = Counter()
    for number in windows.list_windows(store):
        manifest = windows.read_window(store, number)
        for each in manifest.rollouts:
            key = windows.rollout_key(each.tenant, each.user, each.rollout)
            assert blake3(store.get(key)).hexdigest() == each.digest
        found.update(each.rollout for each in manifest.rollouts)
        found.update(each.rollout for each in manifest.exclusions)
    return found


EVERY_ROLLOUT = Counter({identify_rollout("acme", user, "r-1"): 1 for user in USERS})


@pytest.mark.parametrize("takes_effect", [False, True])
async def test_a_kill_at_any_write_trains_every_rollout_once(*, takes_effect: bool) -> None:
    stores = await prepare()
    num_kills = 0
    while True:
        point = KillPoint(at=num_kills + 1, takes_effect=takes_effect)
        store = KilledStore(point=point)
        store.objects.update(stores.ledger.objects)
        try:
            build(store, stores.keys).run_pass()
        except KilledError:
            num_kills += 1
        else:
            break
        left = MemoryStore(objects=dict(store.objects))
        check(left)
        build(left, stores.keys).run_pass()
        assert check(left) == EVERY_ROLLOUT
    assert num_kills >= 9  # an epoch, 6 rollouts, 2 windows
    assert check(store) == EVERY_ROLLOUT


@dataclass(slots=True)
class RacingStore(MemoryStore):
    """Lets another service act just before the first object with a prefix is created."""

    prefix: str = ""
    act: Callable[[], None] = lambda: None
    has_acted: bool = field(default=False)

    @override
    def create(self, key: str, data: bytes) -> None:
        if key.startswith(self.prefix) and not self.has_acted:
            self.has_acted = True
            self.act()
        MemoryStore.create(self, key, data)


@pytest.mark.parametrize("prefix", [windows.ROLLOUTS, windows.WINDOWS])
async def test_of_two_services_one_closes_each_window(prefix: str) -> None:
    stores = await prepare()
    store = RacingStore(objects=stores.ledger.objects, prefix=prefix)
    first = build(store, stores.keys)
    # The other one has another clock, so that its windows differ.
    store.act = lambda: build(store, stores.keys, now_ms=SETTLED_MS + 1).run_pass()
    for _ in range(2):
        with contextlib.suppress(FencedError):  # its process ends with it
            first.run_pass()
    assert check(store) == EVERY_ROLLOUT
    assert {windows.read_window(store, number).closed_ms for number in (1, 2)} == {SETTLED_MS + 1}


async def test_an_erasure_during_a_closing_leaves_no_rollout_of_the_user() -> None:
    stores = await prepare()
    user = SECRET.user_id("acme", "a")
    async with living(stores) as intake:
        loop = asyncio.get_running_loop()

        def erase() -> None:
            erasure = intake.ledger.erase_user(user, now_ms=SETTLED_MS)
            asyncio.run_coroutine_threadsafe(erasure, loop).result()

        store = RacingStore(objects=stores.ledger.objects, prefix=windows.WINDOWS, act=erase)
        intake.ledger.log.store = store
        builder = WindowBuilder(intake.ledger, RULES, clock_ms=lambda: SETTLED_MS)
        await asyncio.to_thread(builder.run_pass)
        await asyncio.to_thread(builder.run_pass)
    assert not list(store.list(windows.rollout_prefix(*user)))
    others = SECRET.user_id("acme", "b")
    assert list(store.list(windows.rollout_prefix(*others)))


async def test_what_a_user_does_after_an_erasure_and_a_new_consent_stays() -> None:
    stores = await prepare()
    user = SECRET.user_id("acme", "a")
    async with living(stores) as intake:
        await asyncio.to_thread(
            WindowBuilder(intake.ledger, RULES, clock_ms=lambda: SETTLED_MS).run_pass
        )
        assert list(stores.ledger.list(windows.rollout_prefix(*user)))
        await intake.ledger.erase_user(user, now_ms=NOW_MS)
        a_minute_later = datetime.fromtimestamp(NOW_MS / 1_000 + 60, UTC).isoformat()
        again = examples.encoded("shown", id="again", user="a", decided=a_minute_later)
        (answer,) = await intake.take([again], SERVER)
        assert answer.status == 202
    started_ms = SETTLED_MS
    later = [turn(user, "r-2", started_ms=started_ms) for user in ("a", "b", "c")]
    write_turns(stores.ledger, later)
    for _ in range(2):
        build(stores.ledger, stores.keys, now_ms=2 * SETTLED_MS - NOW_MS).run_pass()
    left = [info.key for info in stores.ledger.list(windows.rollout_prefix(*user))]
    assert left == [windows.rollout_key(*user, identify_rollout("acme", "a", "r-2"))]
