"""How a controller gets a Ray of its own."""

import pytest
import ray

from etude.trainer import ray_backend

LATE = "The current node timed out during startup."


def failing(times: int, words: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have ray.init fail so often; what was called is in the answer."""
    calls: list[str] = []

    def init(**_: object) -> None:
        calls.append("init")
        if calls.count("init") <= times:
            raise Exception(words)  # noqa: TRY002 - as Ray does

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    return calls


def test_a_ray_node_that_is_late_on_a_busy_computer_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = failing(2, LATE, monkeypatch)
    ray_backend.start_ray(None)
    assert calls == ["init", "shutdown", "init", "shutdown", "init"]


def test_a_ray_node_that_is_always_late_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = failing(ray_backend.START_ATTEMPTS, LATE, monkeypatch)
    with pytest.raises(Exception, match=ray_backend.TOO_SLOW):
        ray_backend.start_ray(None)
    assert calls.count("init") == ray_backend.START_ATTEMPTS


def test_any_other_failure_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = failing(1, "no memory", monkeypatch)
    with pytest.raises(Exception, match="no memory"):
        ray_backend.start_ray(None)
    assert calls == ["init"]
