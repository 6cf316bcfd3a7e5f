"""Checks without which no difference between arms means anything."""

import math

MIN_P = 0.001
"""Of the split of users: below it assignment or logging lost users of one arm."""
MAX_SHARE_IN_BOTH = 0.01
"""Of users seen in both arms; they are left out of both."""


def find_invalidity(control_users: int, treatment_users: int, users_in_both: int) -> str | None:
    """Say why the arms cannot be compared, or return None.

    The first two count users seen in one arm alone.
    """
    total = control_users + treatment_users + users_in_both
    if users_in_both > MAX_SHARE_IN_BOTH * total:
        return f"{users_in_both:,} of {total:,} users were served both arms"
    p = split_p_value(control_users, treatment_users)
    if p < MIN_P:
        split = f"{control_users:,} and {treatment_users:,} users"
        return f"the arms have {split}, which an even split has with p = {p:.1g}"
    return None


def split_p_value(control_users: int, treatment_users: int) -> float:
    """Probability of a split at least as uneven, of users who were to be split evenly.

    Sample-ratio mismatch: Pearson's χ² with one degree of freedom. Meant for one look a window: of
    100 experiments with an even split, 100 looks refuse 1.3 to 1.8, and one look 0.1.
    """
    total = control_users + treatment_users
    if not total:
        return 1.0
    chi2 = (control_users - treatment_users) ** 2 / total
    return math.erfc(math.sqrt(chi2 / 2))
