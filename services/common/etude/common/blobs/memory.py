"""A store in a dict, for tests; the contract suite runs on it too."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from blake3 import blake3
from typing_extensions import Buffer, override

from etude.common.blobs.store import (
    ExistsError,
    MissingError,
    ObjectInfo,
    Store,
    checked_create,
    checked_key,
    checked_range,
    exact,
)


@dataclass(slots=True)
class MemoryStore(Store):
    """Objects live as long as this does; `clock` stands for the store's own."""

    url: str = "memory://"
    objects: dict[str, bytes] = field(default_factory=dict)
    clock: Callable[[], float] = lambda: 0.0
    _modified_s: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @override
    def get(self, key: str) -> bytes:
        try:
            return self.objects[checked_key(key)]
        except KeyError:
            raise MissingError(f"{self.url}/{key}: missing") from None

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(self.view(key, start, length))

    @override
    def view(self, key: str, start: int, length: int) -> memoryview:
        checked_range(start, length)
        if not length:
            return memoryview(b"")
        part = memoryview(self.get(key))[start : start + length]
        return exact(part, length, f"{self.url}/{key}")

    @override
    def put(self, key: str, data: Buffer) -> None:
        self._modified_s[checked_key(key)] = self.clock()
        self.objects[key] = bytes(data)

    @override
    def create(self, key: str, data: bytes) -> None:
        checked_create(data)
        with self._lock:
            if checked_key(key) in self.objects:
                raise ExistsError(f"{self.url}/{key}")
            self._modified_s[key] = self.clock()
            self.objects[key] = bytes(data)

    @override
    def head(self, key: str) -> ObjectInfo | None:
        data = self.objects.get(checked_key(key))
        return None if data is None else self._described(key, data)

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        for key, data in sorted(self.objects.copy().items()):
            if key.startswith(prefix) and key > after:
                yield self._described(key, data)

    @override
    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(checked_key(key), None)

    def _described(self, key: str, data: bytes) -> ObjectInfo:
        modified_s = float(int(self._modified_s.get(key, 0.0)))
        return ObjectInfo(key, len(data), blake3(data).hexdigest(), modified_s)
