"""The inference role ends when it is told to, whatever it does at that time."""

import signal
from typing import Any

BUILD_S = 10
"""Less than any build of an engine takes."""


def test_it_does_not_finish_its_engine_first(role: Any) -> None:
    role.await_answer(role.probe_port, "/livez", 200)
    role.process.send_signal(signal.SIGTERM)
    assert role.process.wait(BUILD_S) == 0
