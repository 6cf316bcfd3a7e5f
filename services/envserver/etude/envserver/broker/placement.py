"""Which node gets how many environments."""

from collections.abc import Mapping


def placement(count: int, free: Mapping[str, int]) -> dict[str, int]:
    """Spread environments so that the fullest node stays as free as it can.

    Args:
        count: environments to place.
        free: free slots by node.

    Returns:
        Environments by node; fewer than count when there are not enough slots.
    """
    left = dict(free)
    placed: dict[str, int] = {}
    for _ in range(count):
        node = max(sorted(left), key=left.__getitem__, default=None)
        if node is None or left[node] <= 0:
            break
        left[node] -= 1
        placed[node] = placed.get(node, 0) + 1
    return placed
