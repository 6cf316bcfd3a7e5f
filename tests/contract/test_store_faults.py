"""What a bucket's client does when requests fail: 503, resets, lost replies, slowness."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.stores import s3_servers
from tests.support.stores.fault_proxy import fault_proxy
from tests.support.stores.store_faults import Fault, Schedule

from etude.cli.buckets import make_bucket
from etude.common.blobs import (
    Deadlines,
    DeniedError,
    ExistsError,
    ObstoreStore,
    Range,
    RangeReader,
    Store,
    TransferLimits,
    open_store,
    probe,
)
from etude.common.errors import StoreError

RETRIES = 4
QUICK = Deadlines(connect_s=5, request_s=20, range_s=20, retries=RETRIES, retry_s=30)
CONTENT = bytes(n * 31 % 251 for n in range(10_000))


class Behind(NamedTuple):
    """A bucket reached through the proxy, and the same one reached directly."""

    store: Store
    direct: Store
    faults: Schedule
    endpoint: str
    prefix: str


@pytest.fixture(params=["moto", "minio"])
def behind(
    request: pytest.FixtureRequest, tmp_path: Path, s3_credentials: None
) -> Iterator[Behind]:
    endpoint: str = request.getfixturevalue(f"{request.param}_endpoint")
    prefix, faults = f"s3://{s3_servers.BUCKET}/{tmp_path.name}", Schedule()
    with fault_proxy(endpoint, faults) as proxied:
        store = open_store(prefix, endpoint=proxied, deadlines=QUICK)
        direct = open_store(prefix, endpoint=endpoint)
        yield Behind(store, direct, faults, proxied, prefix)


READS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("a"),
    "get_range": lambda store: store.get_range("a", 7, 100),
    "head": lambda store: store.head("a"),
    "list": lambda store: list(store.list("")),
}


@pytest.mark.parametrize("call", READS)
@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.RESET, Fault.LOST_REPLY])
def test_a_read_goes_through_a_burst_of_faults(behind: Behind, call: str, fault: Fault) -> None:
    behind.direct.put("a", CONTENT)
    behind.faults.push(*[fault] * (RETRIES - 1))
    assert READS[call](behind.store) == READS[call](behind.direct)
    assert sum(behind.faults.met.values()) == RETRIES - 1


def test_an_answer_that_breaks_off_is_never_taken_for_whole(behind: Behind) -> None:
    behind.direct.put("a", CONTENT)
    behind.faults.push(Fault.CUT)
    assert behind.store.get("a") == CONTENT
    behind.faults.push(Fault.CUT)
    [answer] = RangeReader(behind.store).read([Range("a", 0, len(CONTENT))])
    assert answer.data == CONTENT


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.RESET, Fault.LOST_REPLY])
def test_an_overwrite_is_sent_again_because_twice_is_as_good_as_once(
    behind: Behind, fault: Fault
) -> None:
    behind.faults.push(fault)
    behind.store.put("a", CONTENT)
    assert behind.direct.get("a") == CONTENT


@pytest.mark.parametrize("method", ["PUT", "POST"])  # parts; first and last request
@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.RESET, Fault.LOST_REPLY])
def test_a_large_object_arrives_whole_whichever_of_its_requests_fails(
    behind: Behind, method: str, fault: Fault
) -> None:
    data = bytes(range(251)) * ((17 << 20) // 251)
    faults = Schedule(hits=lambda call, _key: call == method)
    faults.push(None, fault)
    with fault_proxy(behind.endpoint, faults) as bad:
        store = open_store(behind.prefix, endpoint=bad, deadlines=QUICK)
        assert isinstance(store, ObstoreStore)
        store.parts_above = 1 << 20  # two parts are enough here
        store.put("large", data)
    assert faults.met == {(method, fault): 1}
    assert behind.direct.get("large") == data


def test_a_delete_is_sent_again_and_what_is_gone_is_success(behind: Behind) -> None:
    behind.direct.put("a", CONTENT)
    behind.faults.push(Fault.UNAVAILABLE, Fault.LOST_REPLY)
    behind.store.delete(["a"])
    assert behind.direct.head("a") is None


def test_a_create_that_the_store_refused_for_a_while_comes_to_be(behind: Behind) -> None:
    behind.faults.push(Fault.UNAVAILABLE, Fault.UNAVAILABLE)
    behind.store.create("a", b"mine")
    assert behind.direct.get("a") == b"mine"


def test_a_create_whose_reply_was_lost_is_settled_by_reading_back(behind: Behind) -> None:
    behind.faults.push(Fault.LOST_REPLY)
    with pytest.raises(ExistsError):  # of the client's second try: a question, not an answer
        behind.store.create("a", b"mine")
    assert behind.store.get("a") == b"mine"


def test_a_create_that_never_arrived_can_be_repeated(behind: Behind) -> None:
    behind.faults.push(*[Fault.RESET] * (RETRIES + 1))
    with pytest.raises(StoreError):
        behind.store.create("a", b"mine")
    behind.faults.clear()
    behind.store.create("a", b"mine")
    assert behind.direct.get("a") == b"mine"


def test_of_many_creators_over_a_bad_line_no_two_believe_that_they_won(behind: Behind) -> None:
    behind.faults.push(
        *[Fault.LOST_REPLY, Fault.UNAVAILABLE, None, Fault.RESET, Fault.LOST_REPLY] * 4
    )

    def create(number: int) -> bool:
        try:
            behind.store.create("a", str(number).encode())
        except (ExistsError, StoreError):
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = [number for number, is_mine in enumerate(pool.map(create, range(8))) if is_mine]
    kept = behind.direct.get("a")
    assert len(won) <= 1
    assert all(str(number).encode() == kept for number in won)


def test_refused_credentials_are_said_at_once_and_not_tried_again(behind: Behind) -> None:
    for call in (*READS.values(), lambda store: store.put("a", b"")):
        before = sum(behind.faults.met.values())
        behind.faults.push(Fault.DENIED)
        with pytest.raises(DeniedError):
            call(behind.store)
        assert sum(behind.faults.met.values()) == before + 1


def test_a_store_that_is_away_is_given_up_after_the_last_retry(behind: Behind) -> None:
    behind.faults.down(is_down=True)
    with pytest.raises(StoreError, match="SlowDown"):
        behind.store.get("a")
    assert sum(behind.faults.met.values()) == RETRIES + 1
    with pytest.raises(StoreError, match=r"create: .*check endpoint"):
        probe(behind.store)


def test_a_slow_read_is_asked_again_after_its_time_limit(behind: Behind) -> None:
    behind.direct.put("a", CONTENT)
    faults = Schedule()
    faults.push(Fault.SLOW)
    limits = Deadlines(request_s=1, retries=1)
    with fault_proxy(behind.endpoint, faults, slow_s=60) as slow:
        store = open_store(behind.prefix, endpoint=slow, deadlines=limits)
        assert store.get("a") == CONTENT


def test_ranges_over_a_bad_line_are_exact(behind: Behind) -> None:
    behind.direct.put("a", CONTENT)
    rates = dict.fromkeys((Fault.UNAVAILABLE, Fault.RESET, Fault.LOST_REPLY, Fault.CUT), 0.05)
    faults = Schedule(seed=1, rates=rates)
    ranges = [Range("a", start, 100) for start in range(0, len(CONTENT), 100)]
    with fault_proxy(behind.endpoint, faults) as bad:
        store = open_store(behind.prefix, endpoint=bad, deadlines=QUICK)
        reader = RangeReader(store, TransferLimits(retries_per_transfer=200))
        answers = {each.range: bytes(each.data) for each in reader.read(ranges)}
    assert answers == {r: CONTENT[r.start : r.start + r.length] for r in ranges}
    assert reader.retries >= len(faults.met), "every kind of fault was met, and repeated"


def test_a_server_that_was_killed_is_missed_and_has_kept_what_it_acknowledged(
    tmp_path: Path, minio_endpoint: str, s3_credentials: None
) -> None:
    server = s3_servers.MinioServer(tmp_path)
    server.start()
    try:
        make_bucket("s3://etude", endpoint=server.endpoint)
        limits = Deadlines(retries=2, retry_s=5)
        store = open_store("s3://etude", endpoint=server.endpoint, deadlines=limits)
        store.put("a", CONTENT)
        store.create("manifest", b"{}")
        server.stop()
        for call in (*READS.values(), lambda each: each.create("b", b"")):
            with pytest.raises(StoreError):
                call(store)
        server.start()
        assert store.get("a") == CONTENT
        with pytest.raises(ExistsError):
            store.create("manifest", b"other")
        store.create("b", b"")
    finally:
        server.stop()
