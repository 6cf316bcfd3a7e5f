"""Brokers of one pool: their addresses, and the broker that a host or a batch belongs to."""

import json
from collections.abc import Collection

from blake3 import blake3

MAX_SHARDS = 64
LABEL_LENGTH = 8


def choose_shard(key: str, names: Collection[str]) -> str:
    """The broker of a host or a batch: all parts that know the same brokers agree on it.

    When a broker is added or lost, only those keys move that it gets or had.

    Source: Thaler and Ravishankar, https://doi.org/10.1109/90.663936.

    Raises:
        ValueError: there is no broker.
    """
    if not names:
        raise ValueError("no broker to choose")
    if len(names) == 1:
        return next(iter(names))
    return max(names, key=lambda name: (blake3(f"{name}\n{key}".encode()).digest(length=8), name))


def shard_label(name: str) -> str:
    """Label of a broker in the ids of the leases that it grants."""
    return blake3(name.encode()).hexdigest(length=LABEL_LENGTH // 2)


def granting_label(lease_id: str) -> str:
    """Label of the broker that granted a lease."""
    return lease_id.rpartition("-")[2]


def batch_key(idempotency_key: str, group_id: str = "", image: str = "") -> str:
    """The key by which a batch belongs to a broker.

    Batches of one image by its digest have the same, so that few hosts pull it; otherwise those of
    one group.
    """
    return image.partition("@")[2] or group_id or idempotency_key


def parse_targets(text: str) -> tuple[str, ...]:
    """Addresses by which brokers of one pool are found: host:port, separated by commas.

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
