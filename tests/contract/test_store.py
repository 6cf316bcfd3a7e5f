"""One contract for every object store: memory, folder, S3 emulator, S3 server."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from etude.common.blobs import (
    ExistsError,
    MemoryStore,
    MissingError,
    NoBucketError,
    Range,
    RangeReader,
    ShortReadError,
    Store,
    open_store,
    probe,
)
from etude.common.blobs.conformance import check_promises
from etude.common.errors import InvalidFieldError, StoreError, UserError

WORKERS = 8


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


def test_what_was_put_is_read_back_and_overwritten(store: Store) -> None:
    store.put("a/b", b"one")
    store.put("a/b", b"two")
    assert store.get("a/b") == b"two"
    found = store.head("a/b")
    assert found is not None
    assert (found.key, found.size) == ("a/b", 3)


def test_an_object_carries_another_tag_when_its_content_changed(store: Store) -> None:
    store.put("a", b"one")
    [before] = store.list("")
    assert store.head("a") == before
    store.put("a", b"two")
    [after] = store.list("")
    assert after.size == before.size
    assert after.tag != before.tag


def test_a_key_is_created_once(store: Store) -> None:
    store.create("manifest", b"first")
    with pytest.raises(ExistsError):
        store.create("manifest", b"second")
    assert store.get("manifest") == b"first"


def test_of_many_creators_exactly_one_wins(store: Store) -> None:
    wins: list[int] = []

    def race(number: int) -> None:
        try:
            store.create("race", str(number).encode())
            wins.append(number)
        except ExistsError:
            return

    threads = [threading.Thread(target=race, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(n).encode() for n in wins] == [store.get("race")]


def test_a_missing_key_is_said_so(store: Store) -> None:
    assert store.head("nothing") is None
    with pytest.raises(MissingError):
        store.get("nothing")
    store.delete(["nothing"])


def test_a_listing_is_sorted_by_key_and_takes_any_prefix(store: Store) -> None:
    for key in ("w/10", "w/2", "w/1", "x/1"):
        store.put(key, b"")
    assert [o.key for o in store.list("w/")] == ["w/1", "w/10", "w/2"]
    assert [o.key for o in store.list("w/1")] == ["w/1", "w/10"]
    assert [o.key for o in store.list("")] == ["w/1", "w/10", "w/2", "x/1"]
    assert list(store.list("y/")) == []


def test_a_listing_resumes_after_a_key_that_need_not_exist(store: Store) -> None:
    for key in ("w/1", "w/10", "w/2", "x/1"):
        store.put(key, b"")
    assert [o.key for o in store.list("w/", after="w/1")] == ["w/10", "w/2"]
    assert [o.key for o in store.list("w/", after="w/15")] == ["w/2"]
    assert [o.key for o in store.list("w/", after="w/2")] == []
    assert [o.key for o in store.list("", after="w/10")] == ["w/2", "x/1"]


def test_the_folders_below_a_prefix_are_listed_without_their_objects(store: Store) -> None:
    assert not store.list_folders("logs/")
    for key in ("logs/b/1", "logs/a/1", "logs/a/x/2", "logs/top", "logs-of-others/c/1"):
        store.put(key, b"")
    assert list(store.list_folders("logs/")) == ["a", "b"]


def test_a_range_is_exactly_what_was_asked_for(store: Store) -> None:
    store.put("blob", b"0123456789")
    assert store.get_range("blob", 2, 3) == b"234"
    assert bytes(store.view("blob", 0, 10)) == b"0123456789"
    assert store.get_range("blob", 4, 0) == b""


@pytest.mark.parametrize(("start", "length"), [(8, 5), (10, 1), (20, 3)])
def test_a_range_past_the_end_is_an_error(store: Store, start: int, length: int) -> None:
    store.put("blob", b"0123456789")
    for read in (store.get_range, store.view):
        with pytest.raises(ShortReadError, match="blob"):
            read("blob", start, length)


def test_a_range_of_a_missing_key_is_said_so(store: Store) -> None:
    with pytest.raises(MissingError):
        store.get_range("nothing", 0, 1)


def test_any_contiguous_buffer_can_be_put(store: Store) -> None:
    store.put("a", memoryview(bytearray(b"0123456789"))[2:6])
    assert store.get("a") == b"2345"
    store.put("b", memoryview(b"12345678").cast("H"))
    assert store.get("b") == b"12345678"


def test_an_object_above_one_request_is_put_in_parts(store: Store) -> None:
    data = bytes(range(251)) * ((65 << 20) // 251)
    store.put("large", data)
    found = store.head("large")
    assert found is not None
    assert found.size == len(data)
    reader = RangeReader(store)
    ranges = [Range("large", start, 16 << 20) for start in range(0, 64 << 20, 16 << 20)]
    for (_, start, length), part in reader.read(ranges):
        assert part == data[start : start + length]


def test_a_create_is_one_request_and_so_has_a_limit(store: Store) -> None:
    with pytest.raises(InvalidFieldError, match="use put"):
        store.create("a", bytes((16 << 20) + 1))


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.", "a\0b", "a\n"])
def test_a_key_that_could_leave_the_store_is_refused(store: Store, key: str) -> None:
    for call in (store.get, store.head, lambda k: store.put(k, b""), lambda k: store.delete([k])):
        with pytest.raises(InvalidFieldError, match="key"):
            call(key)


def test_keys_may_have_any_printable_character(store: Store) -> None:
    keys = sorted(["a b/~é%20", "a#1/x", "a+b=c&d?e", "名/x"])
    for key in keys:
        store.put(key, key.encode())
    assert [o.key for o in store.list("")] == keys
    assert [store.get(key).decode() for key in keys] == keys


def test_many_keys_are_deleted_and_missing_ones_are_no_error(store: Store) -> None:
    for number in range(30):
        store.put(f"a/{number:02d}", b"")
    store.delete([f"a/{number:02d}" for number in range(10, 40)])
    assert [o.key for o in store.list("")] == [f"a/{number:02d}" for number in range(10)]
    store.delete([])


def test_an_object_says_when_it_was_changed_in_head_and_listing_alike(store: Store) -> None:
    if isinstance(store, MemoryStore):
        store.clock = itertools.count(1_700_000_000.25).__next__
    store.put("a", b"")
    [listed] = store.list("")
    assert listed.modified_s > 1_600_000_000
    assert store.head("a") == listed


def test_what_was_written_is_read_and_listed_at_once_by_everybody(
    store: Store, request: pytest.FixtureRequest
) -> None:
    # The emulator takes 10 ms of a core for a call.
    rounds = 200 if request.node.callspec.params["any_store"] == "moto" else 1_000

    def round_of(number: int) -> int:
        key, data = f"rounds/{number % 50:03d}/{number}", str(number).encode()
        store.put(key, data)
        stale = store.get(key) != data
        return stale + (key not in {o.key for o in store.list(f"rounds/{number % 50:03d}/")})

    with ThreadPoolExecutor(WORKERS) as pool:
        assert sum(pool.map(round_of, range(rounds))) == 0


def test_of_32_publishers_of_one_manifest_one_wins(store: Store) -> None:
    def publish(number: int) -> bool:
        try:
            store.create("manifests/000001/000000000001.json", str(number).encode())
        except ExistsError:
            return False
        return True

    with ThreadPoolExecutor(32) as pool:
        won = list(pool.map(publish, range(32)))
    assert won.count(True) == 1
    assert store.get("manifests/000001/000000000001.json") == str(won.index(True)).encode()


def test_the_probe_accepts_every_store_of_this_contract(store: Store) -> None:
    probe(store)
    assert [v.call for v in check_promises(store) if v.trouble] == []
    assert list(store.list("probe/")) == []


@pytest.mark.parametrize("server", ["moto", "minio"])
@pytest.mark.usefixtures("s3_credentials")
def test_a_bucket_that_is_not_there_is_no_missing_object(
    server: str, request: pytest.FixtureRequest
) -> None:
    store = open_store("s3://absent", endpoint=request.getfixturevalue(f"{server}_endpoint"))
    for call in (store.get, lambda key: list(store.list(key)), lambda key: store.create(key, b"")):
        with pytest.raises(NoBucketError, match="the bucket does not exist"):
            call("a")
    with pytest.raises(StoreError, match=r"s3://absent: create: .*`etude storage init`"):
        probe(store)


def test_a_url_that_names_no_store_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"file:///absolute/folder or s3://bucket/prefix"):
        open_store("ftp://host/x")


def test_a_bucket_of_aws_needs_no_endpoint() -> None:
    assert open_store("s3://bucket/prefix") is not None
