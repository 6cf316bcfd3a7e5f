"""Injected faults: the same seed gives the same ones, and a fault does what it says."""

import pytest
from tests.support.stores.store_faults import Fault, FaultyStore, Schedule

from etude.common.blobs import DeniedError, MemoryStore
from etude.common.errors import StoreError

RATES = {Fault.UNAVAILABLE: 0.2, Fault.LOST_REPLY: 0.1}


def drawn(seed: int) -> list[Fault | None]:
    schedule = Schedule(seed=seed, rates=RATES)
    return [schedule.next("get", str(n)) for n in range(2_000)]


def test_a_seed_gives_the_same_faults_each_time_and_about_as_often_as_asked() -> None:
    assert drawn(3) == drawn(3) != drawn(4)
    for fault, rate in RATES.items():
        # Four standard deviations of a binomial with 2,000 trials.
        assert abs(drawn(3).count(fault) - 2_000 * rate) < 4 * (2_000 * rate * (1 - rate)) ** 0.5


def test_faults_hit_only_the_calls_that_they_are_meant_for() -> None:
    schedule = Schedule(rates={Fault.DENIED: 1}, hits=lambda call, key: (call, key) == ("put", "a"))
    store = FaultyStore(MemoryStore(), schedule)
    store.put("b", b"")
    assert store.head("a") is None
    with pytest.raises(DeniedError):
        store.put("a", b"")
    assert schedule.met == {("put", Fault.DENIED): 1}


@pytest.mark.parametrize(
    ("fault", "is_written"),
    [(Fault.UNAVAILABLE, False), (Fault.RESET, False), (Fault.LOST_REPLY, True)],
)
def test_a_failed_write_took_effect_only_if_its_reply_was_lost(
    fault: Fault, *, is_written: bool
) -> None:
    inner, schedule = MemoryStore(), Schedule()
    schedule.push(fault)
    with pytest.raises(StoreError):
        FaultyStore(inner, schedule).create("a", b"x")
    assert ("a" in inner.objects) is is_written


def test_a_flipped_read_differs_in_one_bit_and_harms_nothing_stored() -> None:
    inner, schedule = MemoryStore(objects={"a": bytes(100)}), Schedule()
    store = FaultyStore(inner, schedule)
    schedule.push(Fault.FLIPPED)
    assert sum(byte.bit_count() for byte in store.get("a")) == 1
    assert store.get("a") == inner.get("a")
