"""Seed derivation and seeded permutation: the shuffled order of tasks and data at any index."""

import hashlib

_ROUNDS = 4
"""Luby and Rackoff: four rounds make a pseudo-random permutation of a keyed function."""


def permute_index(index: int, *, size: int, seed: int) -> int:
    """Map an index through a pseudo-random permutation of [0, size).

    Raises:
        ValueError: the index is outside [0, size).

    Source: balanced Feistel network with cycle walking, https://doi.org/10.1007/3-540-45760-7_9.
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is outside [0, {size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    place = _feistel(index, half=half, seed=seed)
    while place >= size:  # the domain is at most four times too large
        place = _feistel(place, half=half, seed=seed)
    return place


def _feistel(value: int, *, half: int, seed: int) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (derive_seed(seed, turn, right) & mask)
    return left << half | right


def derive_seed(seed: int, *parts: int | str) -> int:
    """Derive a 63-bit seed for one purpose from the seed of a whole phase."""
    text = "\0".join([str(seed), *map(str, parts)]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
