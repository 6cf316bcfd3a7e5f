"""Run ids with their owners: a broker puts the caller's certificate before the id that it sends."""

SEPARATOR = "//"
"""Between owner and id; neither the parts of an identity nor an id of a client have it."""


def owned_id(owner: str, run_id: str) -> str:
    """The run id of an owner; without one, the id alone."""
    return f"{owner}{SEPARATOR}{run_id}" if owner else run_id


def owner_part(run_id: str) -> str:
    """Owner of a run id; empty for one that has none."""
    owner, separator, _ = run_id.partition(SEPARATOR)
    return owner if separator else ""


def client_part(run_id: str) -> str:
    """The run id as its client sent it."""
    owner, separator, rest = run_id.partition(SEPARATOR)
    return rest if separator else owner
