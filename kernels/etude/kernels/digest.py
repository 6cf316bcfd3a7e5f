"""State digest on the device: two 64-bit sums over all elements, in any order.

The formula is in digest_reference.
"""

from torch import Tensor

from etude.kernels import digest_reference
from etude.kernels.dispatch import uses_triton
from etude.kernels.raw_words import raw_words


def digest_scan(tensor: Tensor, *, first_lane: int = 0) -> Tensor:
    """Digest of a contiguous tensor whose element 0 has lane `first_lane`.

    Returns:
        Two lanes as the int64 of the same bits, so that digests add and subtract with `+` and `-`;
        `digest_lanes` gives them as numbers. On the tensor's device. [2]

    Raises:
        ValueError: the tensor's elements are not words, or the lane is out of range.
    """
    if not 0 <= first_lane < 1 << 62:
        raise ValueError(f"first_lane is {first_lane}: it is at least 0 and below 2^62")
    raw = raw_words(tensor, name="tensor")
    if uses_triton(raw):
        from etude.kernels import digest_triton

        return digest_triton.digest_scan(raw, first_lane=first_lane)
    return digest_reference.digest_scan(raw, first_lane=first_lane)


def digest_lanes(digest: Tensor) -> tuple[int, int]:
    """A digest's lanes as unsigned numbers; waits for the device."""
    a, b = digest.tolist()
    return a % (1 << 64), b % (1 << 64)
