"""Running background commands of a guest, from its answers and events."""

import contextlib
from collections.abc import Iterable, Iterator

from etude.v1 import guest_pb2

_MOST_ENDED = 256
"""More job exits than our guest agent reports during the start of one command."""


class RunningJobs:
    """Tracks them; a job's exit event may come before the answer to its start."""

    def __init__(self, running: Iterable[int] = ()) -> None:
        self.running = set(running)
        self._ended: set[int] = set()
        self._num_starting = 0

    @contextlib.contextmanager
    def span_call(self, call: guest_pb2.GuestCall) -> Iterator[None]:
        is_start = call.exec.background
        self._num_starting += is_start
        try:
            yield
        finally:
            self._num_starting -= is_start
            if self._num_starting == 0:
                self._ended.clear()

    def add_answer(self, call: guest_pb2.GuestCall, result: guest_pb2.GuestResult) -> None:
        number = result.exec.job
        if call.exec.background and number and number not in self._ended:
            self.running.add(number)
        elif call.HasField("job") and result.HasField("exec") and not result.exec.is_running:
            self.running.discard(call.job.job)

    def add_event(self, event: guest_pb2.GuestEvent) -> None:
        if not event.HasField("job_exit"):
            return
        self.running.discard(event.job_exit.job)
        if self._num_starting and len(self._ended) < _MOST_ENDED:
            self._ended.add(event.job_exit.job)
