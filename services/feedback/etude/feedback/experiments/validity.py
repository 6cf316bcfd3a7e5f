"""Checks without which no difference between arms means anything."""

import math

SPLIT_ALPHA = 0.001
"""Largest chance that an even split is ever refused, over all looks of an experiment."""
MAX_SHARE_IN_BOTH = 0.01
"""Of users seen in both arms; they are left out of both."""
_PRIOR = 50.0
"""Both parameters of the beta distribution of the share of control users if the split is not even:
0.5 with a standard deviation of 0.05."""


def find_invalidity(control_users: int, treatment_users: int, users_in_both: int) -> str | None:
    """Say why the arms cannot be compared, or return None.

    The first two count users seen in one arm alone.
    """
    total = control_users + treatment_users + users_in_both
    if users_in_both > MAX_SHARE_IN_BOTH * total:
        return f"{users_in_both:,} of {total:,} users were served both arms"
    p = split_p_value(control_users, treatment_users)
    if p < SPLIT_ALPHA:
        split = f"{control_users:,} and {treatment_users:,} users"
        return f"the arms have {split}, which an even split ever reaches with p = {p:.1g}"
    return None


def split_p_value(control_users: int, treatment_users: int) -> float:
    """Bound of the chance that users who are split evenly ever have a split as uneven.

    Test of sample-ratio mismatch that may be looked at after every user: Lindon and Malek,
    "Anytime-Valid Inference for Multinomial Count Data" (NeurIPS 2022, arXiv:2011.03567), with two
    arms. With m and n users, N = m + n, and B the beta function,

        E = 2^N B(a + m, a + n) / B(a, a)

    is the Bayes factor of a share drawn from Beta(a, a) against 1/2: a martingale with mean 1 while
    users are split evenly, so that it ever reaches 1/alpha with a probability of at most alpha
    (Ville). The bound is 1/E, at most 1.
    """
    users = control_users + treatment_users
    log_evidence = (
        users * math.log(2)
        + _log_beta(_PRIOR + control_users, _PRIOR + treatment_users)
        - _log_beta(_PRIOR, _PRIOR)
    )
    return math.exp(min(0.0, -log_evidence))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
