"""A store that remembers which ranges were asked for, and damages answers on request."""

from typing_extensions import override

from etude.common.blobs import MemoryStore, Range


class CountingStore(MemoryStore):
    """Every read of a range is noted, before it is answered."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__(objects={} if objects is None else objects)
        self.asked: list[Range] = []
        self.damage_next = 0
        """Answers that are damaged before any is sound."""

    @property
    def asked_bytes(self) -> int:
        """Of all ranges."""
        return sum(each.length for each in self.asked)

    @override
    def view(self, key: str, start: int, length: int) -> memoryview:
        self.asked.append(Range(key, start, length))
        data = bytearray(super().view(key, start, length))
        if self.damage_next:
            self.damage_next -= 1
            data[length // 2] ^= 4
        return memoryview(bytes(data))
