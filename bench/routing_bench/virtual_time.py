"""Event loop whose clock jumps to the next timer: hours of waiting take no time."""

import asyncio
import selectors
from typing import Any

from typing_extensions import override


class _JumpingSelector(selectors.DefaultSelector):
    """Moves the clock by the time that it was to wait."""

    now_s = 0.0

    @override
    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("nothing is left to wait for")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs timers in order without waiting for them."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    @override
    def time(self) -> float:
        return self._jumping.now_s
