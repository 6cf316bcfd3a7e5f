"""What holds for every test, and the object stores that several suites run on."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.support.environments import upstreams
from tests.support.environments.upstreams import World
from tests.support.stores import s3_servers
from typing_extensions import override
from xdist.scheduler import LoadScopeScheduling

from etude.cli.buckets import make_bucket
from etude.common.blobs import MemoryStore, Store, open_store
from etude.envserver.drivers.vm import vmm_processes

# Else Ray, when it is imported below `uv run`, starts each worker through uv in a copied folder.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

SHARED = ("tests/cluster/", "tests/integration/gvisor/")
"""Suites whose tests share one cluster, or the list of containers of a host."""

# Tests do not assert timings: a busy machine is not a failure. In CI each run draws the same
# examples; at a desk they are new ones. `make test` draws few, `make test-system` many
# (--hypothesis-profile=full).
settings.register_profile("full", deadline=None, derandomize="CI" in os.environ)
settings.register_profile("quick", settings.get_profile("full"), max_examples=20)
settings.load_profile("quick")


class Scheduler(LoadScopeScheduling):  # type: ignore[misc] # xdist is untyped
    """Hands out whole files, and what shares something of the host to one process."""

    @override
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in SHARED if file.startswith(folder)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    """How tests are spread where they run in several processes."""
    return Scheduler(config, log)


@pytest.fixture(scope="session", autouse=True)
def _ends_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Machines outlive the node that made them, so a test that fails half-way leaves some."""
    yield
    vmm_processes.kill_processes(
        vmm_processes.find_marked_processes(tmp_path_factory.getbasetemp())
    )


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """The public network as proxies of environments see it, with real servers of this machine."""
    async with upstreams.world(tmp_path) as made:
        yield made


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every S3 server of these tests accepts, in this process's environment."""
    for name, value in s3_servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """An S3 emulator with one bucket, `etude`."""
    with s3_servers.moto() as endpoint:
        _make_bucket(endpoint)
        yield endpoint


@pytest.fixture(scope="session")
def minio_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A MinIO server with one bucket, `etude`."""
    if not s3_servers.minio_binary().exists():
        if os.environ.get("ETUDE_REQUIRE") == "minio":
            pytest.fail("there is no MinIO server: run `make minio`")
        pytest.skip("there is no MinIO server: `make minio` builds one (needs Go)")
    server = s3_servers.MinioServer(tmp_path_factory.mktemp("minio"))
    server.start()
    try:
        _make_bucket(server.endpoint)
        yield server.endpoint
    finally:
        server.stop()


@pytest.fixture(params=["memory", "folder", "moto", "minio"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path, s3_credentials: None) -> Store:
    """Each kind of store in turn, empty."""
    match request.param:
        case "memory":
            return MemoryStore()
        case "folder":
            return open_store(f"file://{tmp_path}/store")
        case kind:
            endpoint: str = request.getfixturevalue(f"{kind}_endpoint")
            return open_store(f"s3://{s3_servers.BUCKET}/{tmp_path.name}", endpoint=endpoint)


def _make_bucket(endpoint: str) -> None:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in s3_servers.CREDENTIALS.items():
            environment.setenv(name, value)
        make_bucket(f"s3://{s3_servers.BUCKET}", endpoint=endpoint)
