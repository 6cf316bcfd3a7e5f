"""Mixture sequential probability ratio test (mSPRT): a comparison that may be looked at for ever.

Robbins (1970); Johari, Koomen, Pekelis and Walsh (Operations Research 70, 2022). A difference d
with variance v is weighed against no difference by its likelihood ratio, averaged over true
differences from a normal distribution with standard deviation τ, the smallest that matters:

    Λ = exp(τ²d² / (2v·(v + τ²))) / √(1 + τ²/v)

Under no difference Λ ever reaches 1/alpha with a probability of at most alpha, however often one
looks.
"""

import numpy as np

from etude.feedback.experiments.user_moments import Difference, Floats

_TINY = 1e-300


def sequence_margin(difference: Difference, tau: float, alpha: float) -> Floats:
    """Half the width of the confidence sequence: the |d| at which Λ is 1/alpha.

    All intervals of an experiment hold the true difference with a probability of at least
    1 - alpha. One end of them is a one-sided test at alpha/2.
    """
    variance = np.maximum(difference.variance, _TINY)
    log_limit = np.log1p(tau**2 / variance) / 2 - np.log(alpha)
    margin: Floats = np.sqrt(2 * variance * (variance + tau**2) / tau**2 * log_limit)
    return margin
