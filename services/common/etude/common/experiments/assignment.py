"""Arms of an experiment: the users who are exposed, and the arm of each."""

from enum import StrEnum
from hashlib import blake2b

BUCKETS = 10_000
MAX_SHARE = BUCKETS // 2
"""Half of all users have the candidate: then everyone is exposed."""


class Arm(StrEnum):
    """One side of a comparison."""

    CONTROL = "control"
    """Serves the stable checkpoint."""
    TREATMENT = "treatment"
    """Serves the candidate."""


def assign_arm(experiment: str, salt: str, user: str, share: int) -> Arm | None:
    """Arm of a user, or None for a user who is not exposed and stays on the stable channel.

    The share counts users with the candidate, in 10,000ths of all; as many are the control. Two
    independent hashes decide: one who is exposed, one the arm. So an arm lasts as long as
    experiment, salt and user do, and a larger share changes no exposed user's arm. Gateway and
    analysis must agree, so this rule never changes.

    Raises:
        ValueError: the share is not from 0 to 5,000.
    """
    if not 0 <= share <= MAX_SHARE:
        raise ValueError(f"share must be from 0 to {MAX_SHARE} of {BUCKETS} users, is {share}")
    if _hash(b"exposure", experiment, salt, user) % BUCKETS >= 2 * share:
        return None
    return (Arm.CONTROL, Arm.TREATMENT)[_hash(b"arm", experiment, salt, user) % 2]


def _hash(purpose: bytes, *texts: str) -> int:
    """64 bits of texts whose lengths count, so that no two lists of texts read the same."""
    digest = blake2b(digest_size=8, person=purpose)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return int.from_bytes(digest.digest(), "big")
