"""Reads of a pool's store by hosts that hold no credentials."""

import hashlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support import needs, oci_layouts
from tests.support.environments.pool_processes import Processes
from tests.support.oci_layouts import file, folder
from tests.support.stores import s3_servers
from tests.support.stores.s3_servers import BUCKET

from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.blobs import DeniedError, MissingError, Store, open_store
from etude.common.errors import (
    ForbiddenError,
    InvalidFieldError,
    StoreError,
    UserError,
    WrongStateError,
)
from etude.common.pinned_images import PinnedImage
from etude.envserver.images import built_image, image_store
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import FILES, MANIFEST
from etude.envserver.images.pull import image_layout, unpacking
from etude.envserver.images.pull.bounded_program import FillLimits
from etude.envserver.images.pull.registry_access import NO_ACCESS
from etude.envserver.read_grants.granted_reads import GrantedReads
from etude.envserver.read_grants.granted_store import GrantedStore
from etude.envserver.read_grants.grantor import MAX_KEYS, ReadGrantor
from etude.v1 import environments_pb2

Driver = Any  # the fixture only proves that this machine allows namespaces


@dataclass(slots=True)
class GrantingBroker:
    """A broker's grantor for a pool that names two prefixes of a store, and what was asked."""

    endpoint: str
    root: str
    grantor: ReadGrantor
    asked: list[environments_pb2.GrantReadsRequest] = field(default_factory=list)

    def ask(
        self, request: environments_pb2.GrantReadsRequest
    ) -> environments_pb2.GrantReadsResponse:
        self.asked.append(request)
        return self.grantor.grant(request)

    def writer(self, prefix: str) -> Store:
        """The store with its credentials, to fill it."""
        return open_store(f"{self.root}/{prefix}", endpoint=self.endpoint)

    def granted(self, prefix: str) -> GrantedStore:
        return GrantedStore(f"{self.root}/{prefix}", self.ask)

    def url_of(self, prefix: str, key: str) -> str:
        uri = f"{self.root}/{prefix}"
        request = environments_pb2.GrantReadsRequest(uri=uri, keys=[key])
        (grant,) = self.grantor.grant(request).grants
        return grant.url


def spec_of(root: str, endpoint: str, **fields: Any) -> EnvPoolSpec:
    return EnvPoolSpec.model_validate(
        {
            "templates": [{"name": "python", "image": f"{root}/templates/{'0' * 32}"}],
            "images": {"sources": [f"{root}/layouts"]},
            "store": {"endpoint": endpoint, "secretRef": {"name": "s3"}},
            **fields,
        }
    )


@pytest.fixture
def pool_broker(minio_endpoint: str, s3_credentials: None, tmp_path: Path) -> GrantingBroker:
    root = f"s3://{BUCKET}/{tmp_path.name}"
    spec = spec_of(root, minio_endpoint)
    made = GrantingBroker(minio_endpoint, root, ReadGrantor(lambda: spec))
    made.writer("layouts").put("app/a b", b"0123456789")
    made.writer("layouts").put("app/empty", b"")
    made.writer("checkpoints").put("step-1", b"weights of another team")
    return made


def read_url(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: bytes = answer.read()
        return found


def test_objects_of_a_named_prefix_are_read_whole_in_part_and_by_listing(
    pool_broker: GrantingBroker,
) -> None:
    store = pool_broker.granted("layouts/app")
    assert (store.get("a b"), store.get("empty")) == (b"0123456789", b"")
    assert (store.get_range("a b", 3, 4), bytes(store.view("a b", 9, 1))) == (b"3456", b"9")
    own = pool_broker.writer("layouts/app")
    assert list(store.list("")) == list(own.list(""))
    assert [info.key for info in store.list("e")] == ["empty"]
    assert store.head("a b") == own.head("a b")
    assert store.head("absent") is None
    with pytest.raises(MissingError):
        store.get("absent")
    with pytest.raises(StoreError):
        store.get_range("a b", 8, 4)


@pytest.mark.parametrize(
    ("prefix", "keys"),
    [
        ("checkpoints", ("step-1",)),
        ("checkpoints", ()),
        ("", ()),
        ("", ("checkpoints/step-1",)),
        ("", ("layouts/../checkpoints/step-1",)),
        ("layouts/../checkpoints", ("step-1",)),
        ("layouts-of-others", ()),
        ("layouts", ("../checkpoints/step-1",)),
        ("layouts", ("",)),
        ("templates", ("two/manifest.json",)),
    ],
)
def test_what_the_pool_does_not_name_is_refused(
    pool_broker: GrantingBroker, prefix: str, keys: tuple[str, ...]
) -> None:
    uri = f"{pool_broker.root}/{prefix}".rstrip("/")
    request = environments_pb2.GrantReadsRequest(uri=uri, keys=keys)
    with pytest.raises((ForbiddenError, InvalidFieldError, UserError)):
        pool_broker.grantor.grant(request)


def test_a_grant_opens_one_object_and_nothing_beside_it(pool_broker: GrantingBroker) -> None:
    url = pool_broker.url_of("layouts", "app/a b")
    assert read_url(url) == b"0123456789"
    for other in (
        url.replace("layouts/app/a%20b", "checkpoints/step-1"),
        url.replace("layouts/app/a%20b", "layouts/app/empty"),
        url.partition("?")[0],
    ):
        assert other != url
        with pytest.raises(urllib.error.HTTPError) as caught:
            read_url(other)
        assert caught.value.code == 403
    for method in ("PUT", "DELETE"):
        request = urllib.request.Request(url, data=b"x", method=method)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        assert caught.value.code == 403
    assert pool_broker.writer("layouts").get("app/a b") == b"0123456789"


def test_a_grant_ends_and_the_host_asks_for_another_one(pool_broker: GrantingBroker) -> None:
    pool_broker.grantor = replace(pool_broker.grantor, lifetime_s=1)
    url, store = pool_broker.url_of("layouts", "app/a b"), pool_broker.granted("layouts/app")
    assert store.get_range("a b", 0, 1) == b"0"

    def is_refused() -> bool:
        try:
            read_url(url)
        except urllib.error.HTTPError as error:
            return error.code == 403
        return False

    wait_until(is_refused)
    before = len(pool_broker.asked)

    def asks_again() -> bool:  # its own grant may end up to a second later
        assert store.get_range("a b", 1, 1) == b"1"
        return len(pool_broker.asked) > before

    wait_until(asks_again)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_nothing_is_written_by_a_grant(pool_broker: GrantingBroker) -> None:
    store = pool_broker.granted("layouts")
    for write in (
        lambda: store.put("x", b"1"),
        lambda: store.create("x", b"1"),
        lambda: store.delete(["app/empty"]),
    ):
        with pytest.raises(DeniedError, match="reading alone"):
            write()


def test_an_error_names_the_object_and_never_its_url(pool_broker: GrantingBroker) -> None:
    store = pool_broker.granted("layouts/app")
    store.get("a b")
    pool_broker.writer("layouts/app").put("a b", b"short")
    with pytest.raises(StoreError) as caught:
        store.get("a b")
    assert "X-Amz" not in str(caught.value)
    assert "layouts/app/a b" in str(caught.value)


def test_a_workspace_is_read_while_an_order_names_it_and_from_its_copy_later(
    pool_broker: GrantingBroker, tmp_path: Path
) -> None:
    uri = f"{pool_broker.root}/tasks/fix"
    for number in range(3):
        pool_broker.writer("tasks/fix").put(f"src/{number}.txt", str(number).encode())
    reads = GrantedReads(pool_broker.ask)
    with pytest.raises(ForbiddenError):
        reads.local_folder(uri, tmp_path / "scratch")
    pool_broker.grantor.workspaces.record(uri, now_s=time.monotonic())
    found = reads.local_folder(uri, tmp_path / "scratch")
    assert (found.name, (found / "src/2.txt").read_bytes()) == ("fix", b"2")
    with pytest.raises(ForbiddenError):
        pool_broker.granted("tasks").get("fix/src/1.txt")

    pool_broker.grantor.workspaces = type(pool_broker.grantor.workspaces)()
    assert reads.local_folder(uri, tmp_path / "scratch") == found


def test_a_long_listing_comes_in_pages(
    pool_broker: GrantingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.envserver.read_grants.grantor.PAGE", 4)
    for number in range(10):
        pool_broker.writer("layouts/many").put(f"{number:02}", b"x")
    assert [info.key for info in pool_broker.granted("layouts/many").list("")] == [
        f"{number:02}" for number in range(10)
    ]
    assert len(pool_broker.asked) == 3


def test_too_many_keys_and_stores_without_a_secret_are_refused(pool_broker: GrantingBroker) -> None:
    uri = f"{pool_broker.root}/layouts"
    request = environments_pb2.GrantReadsRequest(uri=uri, keys=["k"] * (MAX_KEYS + 1))
    with pytest.raises(InvalidFieldError, match=f"more than {MAX_KEYS}"):
        pool_broker.grantor.grant(request)
    with pytest.raises(InvalidFieldError, match="uri"):
        pool_broker.grantor.grant(environments_pb2.GrantReadsRequest(uri="file:///etc"))
    spec = spec_of(pool_broker.root, pool_broker.endpoint, store={"endpoint": pool_broker.endpoint})
    with pytest.raises(WrongStateError, match="has no Secret"):
        ReadGrantor(lambda: spec).grant(environments_pb2.GrantReadsRequest(uri=uri, keys=["a"]))


def test_images_of_templates_and_of_tasks_are_fetched_without_a_credential(
    pool_broker: GrantingBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs.image_programs()
    digest = oci_layouts.write_layout(tmp_path / "oci", [folder("app"), file("app/a", b"1")])
    copy_folder(tmp_path / "oci", pool_broker.writer("layouts/shop"))
    name = push_template(tmp_path, pool_broker)
    spec = spec_of(
        pool_broker.root,
        pool_broker.endpoint,
        templates=[{"name": "python", "image": f"{pool_broker.root}/templates/{name}"}],
    )
    pool_broker.grantor = ReadGrantor(lambda: spec)
    reads = GrantedReads(pool_broker.ask)

    there = BuildCache(tmp_path / "there")
    found = image_store.fetch_image(name, reads.open(f"{pool_broker.root}/templates"), there)
    assert (found.folder / "root.sqsh").read_bytes() == b"root.sqsh" * 1000

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    image = PinnedImage(f"{pool_broker.root}/layouts/shop", digest)
    limits = FillLimits(max_bytes=64 << 20, timeout_s=60, stall_s=30)
    layout = image_layout.fetch_layout(
        image, scratch, registries=NO_ACCESS, reads=reads, limits=limits
    )
    unpacking.unpack_layout(layout, scratch / "tree", limits=limits)
    assert (scratch / "tree/app/a").read_bytes() == b"1"


def copy_folder(folder: Path, store: Store) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(str(path.relative_to(folder)), path.read_bytes())


def push_template(tmp_path: Path, pool_broker: GrantingBroker) -> str:
    folder = tmp_path / "image"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_bytes(name.encode() * 1000)
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    (folder / MANIFEST).write_text(json.dumps({"name": "python", "files": digests}))
    image = built_image.read_image(folder)
    return image_store.push_image(image, pool_broker.writer("templates"), print)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    for process in made.running.values():
        process.kill()
        process.wait()


async def test_a_node_without_credentials_gets_the_workspaces_of_its_orders_alone(
    processes: Processes,
    connect: Callable[..., Any],
    driver: Driver,
    pool_broker: GrantingBroker,
) -> None:
    copy_folder(sources(processes.folder), pool_broker.writer("tasks/fix/environment"))
    whole = json.loads(processes.pool_file.read_text())
    whole["spec"]["store"] = {"endpoint": pool_broker.endpoint, "secretRef": {"name": "s3"}}
    processes.pool_file.write_text(json.dumps(whole))
    processes.start("broker", s3_servers.CREDENTIALS)
    await processes.ready("broker")
    bare: Mapping[str, str] = {"ETUDE_POOL_FILE": ""}
    assert not any(name.startswith("AWS_") for name in processes.environment("node"))
    processes.start("node", bare)
    await processes.ready("node")
    uri = f"{pool_broker.root}/tasks/fix/environment"
    pool = connect(f"127.0.0.1:{processes.ports['broker']}", uri)
    (lease,) = await pool.launch("first")
    said = await pool.turn(lease, ("1", "run_terminal", {"command": "cat greet.sh"}))
    assert said == ["echo hello"]

    refused = environments_pb2.GrantReadsRequest(uri=f"{pool_broker.root}/checkpoints")
    with pytest.raises(Exception, match="below no prefix of the pool's spec"):
        await pool.broker.GrantReads(refused, timeout=10)

    # Brokers that start again know of no order, and a daemon that adopts needs none.
    for role, changes in (("node", bare), ("broker", s3_servers.CREDENTIALS)):
        processes.kill(role)
        processes.start(role, changes)
    for role in ("broker", "node"):
        await processes.ready(role)
    assert "adopted 1 leases" in processes.log("node")


def sources(folder: Path) -> Path:
    made = folder / "to-upload"
    made.mkdir()
    (made / "greet.sh").write_text("echo hello")
    return made
