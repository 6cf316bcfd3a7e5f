"""Service discovery of brokers: shards of a pool's runs over its brokers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from blake3 import blake3

from etude.common.run_ids import client_part

MAX_SHARDS = 64


@dataclass(frozen=True, slots=True)
class BrokerShard:
    """One broker of a pool that has several."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From index/count, the first being 0/count.

        Raises:
            ValueError: it is no such pair.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise ValueError(f"{text!r} is no index/count")
        found = cls(int(index), int(count))
        if not found.index < found.count <= MAX_SHARDS:
            raise ValueError(f"{text!r}: needs index < count <= {MAX_SHARDS}")
        return found

    def serves(self, run_id: str) -> bool:
        """Return true if this broker serves a run."""
        return shard_of(run_id, self.count) == self.index


SINGLE_BROKER = BrokerShard(0, 1)
"""The broker of a pool that has one."""


def shard_of(run_id: str, count: int) -> int:
    """Index of a run's broker. Every part must agree on it, so it never changes.

    The owner of a run id does not count: clients do not know it.
    """
    if count == 1:
        return 0
    return int.from_bytes(blake3(client_part(run_id).encode()).digest(length=8), "big") % count


def parse_targets(text: str) -> tuple[str, ...]:
    """The brokers of one pool in their order: host:port, separated by commas.

    Raises:
        ValueError: one is empty, or there are too many.
    """
    found = tuple(part.strip() for part in text.split(","))
    if not all(found) or len(found) > MAX_SHARDS:
        raise ValueError(f"{text!r} is no list of 1 to {MAX_SHARDS} host:port")
    return found


def brokers_by_environment(text: str) -> dict[str, str]:
    """The setting ETUDE_BROKERS: an object of environment names and lists of targets.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(text)
    except ValueError as cause:
        raise ValueError(f"ETUDE_BROKERS: not JSON: {cause}") from cause
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ValueError("ETUDE_BROKERS: must be an object of environment names and host:port")
    for name, brokers in found.items():
        try:
            parse_targets(brokers)
        except ValueError as cause:
            raise ValueError(f"ETUDE_BROKERS: {name}: {cause}") from cause
    return found


def broker_target(run_id: str, brokers: str) -> str:
    """host:port of the broker that serves a run."""
    found: Sequence[str] = parse_targets(brokers)
    return found[shard_of(run_id, len(found))]
