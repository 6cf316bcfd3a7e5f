"""One contract for every object store: memory, folder, S3."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from typing_extensions import override

from etude.common.blobs import (
    ExistsError,
    MemoryStore,
    MissingError,
    Store,
    open_store,
    probe,
)
from etude.common.errors import StoreError, UserError


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """An S3 emulator with one bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    saved = dict(os.environ)
    os.environ |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="etude")
    yield endpoint
    os.environ.clear()
    os.environ.update(saved)
    server.stop()


@pytest.fixture(params=["memory", "folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    match request.param:
        case "memory":
            return MemoryStore()
        case "folder":
            return open_store(f"file://{tmp_path}/store")
        case _:
            endpoint = request.getfixturevalue("s3_endpoint")
            return open_store(f"s3://etude/{tmp_path.name}", endpoint=endpoint)


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


def test_a_listing_is_sorted_by_key_and_resumes_after_one(store: Store) -> None:
    for key in ("w/10", "w/2", "w/1", "x/1"):
        store.put(key, b"")
    assert [o.key for o in store.list("w/")] == ["w/1", "w/10", "w/2"]
    assert [o.key for o in store.list("w/1")] == ["w/1", "w/10"]


def test_a_range_past_the_end_is_an_error(store: Store) -> None:
    store.put("blob", b"0123456789")
    assert store.get_range("blob", 2, 3) == b"234"
    with pytest.raises(StoreError):
        store.get_range("blob", 8, 5)


def test_the_probe_accepts_every_store_of_this_contract(store: Store) -> None:
    probe(store)
    assert list(store.list("probe/")) == []


def test_the_probe_refuses_a_store_that_overwrites_on_create() -> None:
    class Careless(MemoryStore):
        """A store without conditional puts."""

        @override
        def create(self, key: str, data: bytes) -> None:
            self.put(key, data)

    with pytest.raises(StoreError, match="conditional puts"):
        probe(Careless())


def test_a_url_that_names_no_store_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"file:///absolute/folder or s3://bucket/prefix"):
        open_store("ftp://host/x")


def test_a_bucket_of_aws_needs_no_endpoint() -> None:
    assert open_store("s3://bucket/prefix") is not None
