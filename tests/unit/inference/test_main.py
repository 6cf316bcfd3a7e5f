"""However the inference role ends, it closes what it opened and says why."""

import asyncio
import socket
import sys
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import pytest

from etude.common import role_inputs, stores, telemetry
from etude.common.api.run.spec import ModelSource
from etude.common.errors import UnavailableError
from etude.common.probes import Probes
from etude.inference import main, settings
from etude.inference.updates import store_access


class Story:
    """A role that fails where it is told to, and what was closed after it."""

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.closed: list[str] = []

    async def build(self, *_: object) -> "Story":
        self.fail("build")
        return self

    def read(self, *_: object) -> None:
        self.fail("read")

    def role(self, probes: Probes, **_: object) -> "Story":
        assert probes.port
        return self

    async def start(self) -> None:
        self.fail("start")

    async def run_until(self, _stop: asyncio.Event) -> None:
        self.fail("run")

    async def stop(self) -> None:
        self.closed.append("role")

    def shutdown(self) -> None:
        self.closed.append("shutdown")

    def fail(self, where: str) -> None:
        if where == self.failing:
            raise UnavailableError(f"cannot {where}")


class LeftError(BaseException):
    """Instead of the end of this process."""


def leave(code: int = 0) -> NoReturn:
    raise LeftError(code)


@pytest.mark.parametrize(
    ("failing", "closed"),
    [
        ("read", []),
        ("build", ["shutdown"]),
        ("start", ["shutdown", "shutdown"]),
        ("run", ["role", "shutdown", "shutdown"]),
    ],
)
def test_it_closes_everything_when_it_fails(
    failing: str,
    closed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    story = Story(failing)
    wiring: Any = ModuleType("etude.inference.wiring")
    wiring.InferenceRole = story.role
    monkeypatch.setitem(sys.modules, "etude.inference.wiring", wiring)
    monkeypatch.setattr(main, "build_engine", story.build)
    monkeypatch.setattr(main, "exit_process", leave)
    run = mock.MagicMock()
    run.spec.model = ModelSource(uri="file:///model")
    monkeypatch.setattr(role_inputs, "read_run", lambda _path: run)
    monkeypatch.setattr(stores, "open_run_store", mock.MagicMock())
    monkeypatch.setattr(store_access, "require_readable_store", story.read)
    monkeypatch.setattr(settings, "engine_options", mock.MagicMock())
    monkeypatch.setattr(telemetry, "setup_tracing", lambda *_, **__: story)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("ETUDE_PORT", "ETUDE_HTTP_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("ETUDE_PROBE_PORT", str(port))
    for name in ("ETUDE_RUN_FILE", "ETUDE_SCRATCH"):
        monkeypatch.setenv(name, "/nowhere")
    with pytest.raises(LeftError, match="1"):
        main.main()
    assert story.closed == closed
    assert f"cannot {failing}" in capfd.readouterr().err
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
