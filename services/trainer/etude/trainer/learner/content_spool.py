"""Tokens of finished rollouts that a learner rank fetched ahead of their step, in its memory."""

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

from etude.common.backoff import Backoff
from etude.common.blobs import Store, is_unavailable
from etude.common.errors import EtudeError
from etude.trainer.contents.objects import ObjectSource, read_object
from etude.v1 import rollout_content_pb2

log = logging.getLogger(__name__)

SPOOL_BYTES = 256 << 20
"""Most bytes that a rank keeps: 30 million tokens, or 1,000 rollouts of 30,000."""
READS_AT_ONCE = 16
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
LATE_STEPS = 16
"""Steps whose objects are not fetched any more. Fetches run one after another: with a slow store
they are behind the steps, and would read what these have read."""


class _Fetched(NamedTuple):
    data: bytes
    until: int
    """Last step that may train it, counted from the first of the spool."""


@dataclass(slots=True)
class ContentSpool(ObjectSource):
    """A store of contents in front of the run's; safe to call from threads.

    What does not fit, or cannot be read yet, is read from the run's store by its step.
    """

    store: Store
    limit_bytes: int = SPOOL_BYTES
    url: str = field(init=False)
    _objects: dict[str, _Fetched] = field(default_factory=dict)
    _held_bytes: int = 0
    """Of the objects, and of those that are being read."""
    _step: int = 0
    """Steps that were trained since the start."""
    _trained: deque[frozenset[str]] = field(default_factory=lambda: deque(maxlen=LATE_STEPS))
    """Objects of the last steps."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.url = self.store.url

    def fetch(self, references: Sequence[rollout_content_pb2.ContentObject], *, steps: int) -> None:
        """Fetch objects, again for as long as the store is away and a step may need them.

        Args:
            references: of tokens of finished rollouts.
            steps: after this number of further steps no batch may have them.
        """
        until = self._step + steps
        with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="fetch") as pool:
            list(pool.map(lambda each: self._fetch_one(each, until), references))

    def _fetch_one(self, reference: rollout_content_pb2.ContentObject, until: int) -> None:
        if not self._reserve(reference):
            return
        data = self._read(reference, until)
        with self._lock:
            if data is None or self._is_settled(reference.key):
                self._held_bytes -= reference.num_bytes
            else:
                self._objects[reference.key] = _Fetched(data, until)

    def _reserve(self, reference: rollout_content_pb2.ContentObject) -> bool:
        """Reserve memory for an object; False if it does not fit, or is not needed."""
        with self._lock:
            is_settled = self._is_settled(reference.key)
            if is_settled or self._held_bytes + reference.num_bytes > self.limit_bytes:
                return False
            self._held_bytes += reference.num_bytes
            return True

    def _is_settled(self, key: str) -> bool:
        """True if an object is there, or its step was trained."""
        return key in self._objects or any(key in keys for keys in self._trained)

    def _read(self, reference: rollout_content_pb2.ContentObject, until: int) -> bytes | None:
        """Read an object; None if it cannot be read: its step reports that."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while self._step <= until:
            try:
                return read_object(self.store, reference)
            except EtudeError as error:
                log.warning("%s was not fetched ahead of its step: %s", reference.key, error)
                if not is_unavailable(error):
                    break
            time.sleep(backoff.next_s())
        return None

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._lock:
            fetched = self._objects.get(key)
        if fetched is None or start + length > len(fetched.data):
            return self.store.get_range(key, start, length)
        return fetched.data[start : start + length]

    def count(self, keys: Collection[str]) -> int:
        """Count the objects that were fetched."""
        with self._lock:
            return len(self._objects.keys() & set(keys))

    def end_step(self, keys: Collection[str]) -> None:
        """Drop the objects of a step that was trained, and those that no later one may have."""
        with self._lock:
            self._step += 1
            self._trained.append(frozenset(keys))
            over = [k for k, each in self._objects.items() if k in keys or each.until < self._step]
            for key in over:
                self._held_bytes -= len(self._objects.pop(key).data)
