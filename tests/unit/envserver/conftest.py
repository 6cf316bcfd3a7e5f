"""A node on a driver without walls, and a task's first files."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.envserver.drivers.base import CommandOutcome
from etude.envserver.drivers.folder_driver import FolderCommand
from etude.envserver.drivers.in_memory import MemoryDriver, run_tests
from etude.envserver.host.host import Host
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.v1 import environments_pb2

FILES = {
    "shop/core.py": "def add(a, b):\n    return a - b\n",
    "tests/test_repo.py": "from shop.core import add\ndef test_add():\n    assert add(1, 2) == 3\n",
    "Dockerfile": "FROM python\n",
}
MakeNode = Callable[..., Host]
Order = Callable[..., environments_pb2.OpenEnvironmentsRequest]


@pytest.fixture
def source(tmp_path: Path) -> str:
    folder = tmp_path / "task" / "environment"
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder.as_uri()


@pytest.fixture
def make_node(tmp_path: Path) -> MakeNode:
    def make(slots: int = 4, answer: Callable[[FolderCommand], CommandOutcome] = run_tests) -> Host:
        driver = MemoryDriver(tmp_path / "scratch" / "leases", answer)
        driver.leases.mkdir(parents=True, exist_ok=True)
        return Host(
            driver=driver,
            sources=WorkspaceSources(tmp_path / "scratch"),
            slots=slots,
            templates={"python", "second"},
            refused={"foreign": "not trusted"},
            endpoint="here:1",
        )

    return make


@pytest.fixture
def order(source: str) -> Order:
    """The broker's order for leases of these names."""

    def make(
        *names: str, uri: str = source, ttl_s: float = 60, template: str = "python"
    ) -> environments_pb2.OpenEnvironmentsRequest:
        leases = [
            environments_pb2.HeldLease(
                lease=environments_pb2.Lease(
                    lease_id=name,
                    agent_token=f"agent-{name}",
                    control_token=f"control-{name}",
                    expires_unix_ms=round(1000 * (time.time() + ttl_s)),
                ),
                index=index,
            )
            for index, name in enumerate(names)
        ]
        return environments_pb2.OpenEnvironmentsRequest(
            leases=leases,
            template=template,
            workspace=environments_pb2.WorkspaceSource(uri=uri),
            toolset="Compact",
        )

    return make
