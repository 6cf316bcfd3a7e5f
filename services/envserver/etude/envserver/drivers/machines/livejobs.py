"""Which background commands of a guest run, from what it answers and what it tells by itself."""

import contextlib
from collections.abc import Iterable, Iterator

from etude.v1 import guest_pb2

_MOST_ENDED = 256
"""More ends than a guest of ours tells while one command is being started."""


class LiveJobs:
    """Counts them; the end of one may be told before its beginning was answered."""

    def __init__(self, running: Iterable[int] = ()) -> None:
        """Those run."""
        self.running = set(running)
        self._ended: set[int] = set()
        self._num_starting = 0

    @contextlib.contextmanager
    def watching(self, call: guest_pb2.GuestCall) -> Iterator[None]:
        """The time from a call to its answer."""
        is_start = call.exec.background
        self._num_starting += is_start
        try:
            yield
        finally:
            self._num_starting -= is_start
            if self._num_starting == 0:
                self._ended.clear()

    def answered(self, call: guest_pb2.GuestCall, result: guest_pb2.GuestResult) -> None:
        """Learn from an answer."""
        number = result.exec.job
        if call.exec.background and number and number not in self._ended:
            self.running.add(number)
        elif call.HasField("job") and result.HasField("exec") and not result.exec.is_running:
            self.running.discard(call.job.job)

    def told(self, event: guest_pb2.GuestEvent) -> None:
        """Learn from what the guest says unasked."""
        if not event.HasField("job_exit"):
            return
        self.running.discard(event.job_exit.job)
        if self._num_starting and len(self._ended) < _MOST_ENDED:
            self._ended.add(event.job_exit.job)
