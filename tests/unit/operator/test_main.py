"""The operator's process: how it ends."""

import asyncio
from pathlib import Path

import pytest

from etude.operator.cluster.api import ClusterError
from etude.operator.main import main, run
from etude.operator.settings import PARTS


async def failing(*errors: Exception) -> None:
    async def fail(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
        outer.create_task(fail(errors[0]))
        for error in errors[1:]:
            inner.create_task(fail(error))


def test_what_ends_a_task_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(failing(ClusterError("one"), ClusterError("two"))) == 1
    said = capsys.readouterr().err.splitlines()
    assert sorted(said) == ["etude-operator: one", "etude-operator: two"]


def test_a_bug_stays_loud() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run(failing(ClusterError("one"), KeyError("two")))
    assert caught.group_contains(KeyError)
    assert not caught.group_contains(ClusterError)


def test_a_kubeconfig_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in PARTS:
        monkeypatch.setenv(f"ETUDE_IMAGE_{part.upper()}", "etude:1")
    monkeypatch.setenv("ETUDE_POD", "operator-0")
    monkeypatch.setenv("ETUDE_NAMESPACE", "lab")
    monkeypatch.setenv("ETUDE_PROBE_PORT", "0")
    monkeypatch.setenv("ETUDE_TLS_MODE", "Plaintext")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "none") in said
    assert "Traceback" not in said
