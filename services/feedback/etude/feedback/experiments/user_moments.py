"""Sums over the users of an arm, from which the difference of two arms follows.

The unit is the user, never the event: a user's events are one cluster. A metric is a ratio of two
totals, such as edits kept over edits shown; its variance is that of the delta method over users.
CUPED (Deng, Xu, Kohavi and Walker, WSDM 2013) removes what each user's history explains already.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
COLUMNS = 3
"""Numerator, denominator and history of each user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserMoments:
    """Sums of one metric over the users of one arm, or of many arms along leading axes."""

    users: Floats
    """[...]"""
    sums: Floats
    """[..., 3]: of numerators, denominators and histories."""
    products: Floats
    """[..., 3, 3]: of the products of each two of them."""

    @classmethod
    def from_users(
        cls,
        numerators: ArrayLike,
        denominators: ArrayLike | None = None,
        histories: ArrayLike | None = None,
    ) -> Self:
        """From values of each user, [U]; without denominators the metric is a mean over users.

        Histories are from before the assignment. A user without one has the mean of the others,
        of both arms together: see `fill_histories`.

        Raises:
            ValueError: lengths differ, or a value is not finite.
        """
        first = np.asarray(numerators, np.float64)
        second = np.ones_like(first) if denominators is None else denominators
        third = np.zeros_like(first) if histories is None else histories
        values = np.stack([first, np.asarray(second), np.asarray(third)], axis=-1)
        if values.ndim != 2 or not np.isfinite(values).all():
            raise ValueError("values of users must be finite numbers, one row of each")
        return cls(
            users=np.asarray(float(len(values))),
            sums=values.sum(axis=0),
            products=values.T @ values,
        )

    @property
    def means(self) -> Floats:
        """Of the columns, [..., 3]."""
        return self.sums / self.users[..., None]

    @property
    def covariance(self) -> Floats:
        """[..., 3, 3], unbiased."""
        means = self.means
        outer = means[..., :, None] * means[..., None, :]
        return (self.products - self.users[..., None, None] * outer) / (
            self.users[..., None, None] - 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A metric of two arms; each field may have leading axes."""

    control: Floats
    treatment: Floats
    value: Floats
    """Treatment less control, with the part removed that histories explain."""
    variance: Floats
    """Of the value."""

    @property
    def z(self) -> Floats:
        """The value in standard errors; 0 where nothing varies."""
        error = np.sqrt(self.variance)
        z: Floats = np.divide(self.value, error, out=np.zeros_like(error), where=error > 0)
        return z


def compare_arms(control: UserMoments, treatment: UserMoments) -> Difference:
    """Difference of a metric between two arms of at least two users and one event each.

    A ratio R of means m₁/m₀ moves by (y - R·n)/m₀ with each user, of which θ·(x - x̄) is history,
    θ being the slope of that on x within arms.
    """
    arms = (control, treatment)
    means = [arm.means for arm in arms]
    ratios = [each[..., 0] / each[..., 1] for each in means]
    # Derivatives by the three means, without history at first.
    slopes = [
        np.stack([1 / each[..., 1], -ratio / each[..., 1], np.zeros_like(ratio)], axis=-1)
        for each, ratio in zip(means, ratios, strict=True)
    ]
    covariances = [arm.covariance for arm in arms]
    explained, history = np.zeros_like(ratios[0]), np.zeros_like(ratios[0])
    for arm, slope, covariance in zip(arms, slopes, covariances, strict=True):
        weight = arm.users - 1
        explained = explained + weight * np.einsum("...i,...i", slope, covariance[..., 2])
        history = history + weight * covariance[..., 2, 2]
    theta = np.divide(explained, history, out=np.zeros_like(history), where=history > 0)
    value = ratios[1] - ratios[0] - theta * (means[1][..., 2] - means[0][..., 2])
    variance = np.zeros_like(value)
    for arm, slope, covariance in zip(arms, slopes, covariances, strict=True):
        slope[..., 2] = -theta
        spread = np.einsum("...i,...ij,...j", slope, covariance, slope)
        variance = variance + np.maximum(spread, 0) / arm.users
    # Where each arm is constant: the variance of both as one sample.
    floor = value**2 / (control.users + treatment.users)
    return Difference(
        control=ratios[0],
        treatment=ratios[1],
        value=value,
        variance=np.maximum(variance, floor),
    )


def fill_histories(control: ArrayLike, treatment: ArrayLike) -> tuple[Floats, Floats]:
    """Histories in which users without one (NaN) have the mean of all others, of both arms.

    An arm's own mean would make its error seem smaller than it is.
    """
    first, second = np.asarray(control, np.float64), np.asarray(treatment, np.float64)
    together = np.concatenate([first, second])
    is_known = np.isfinite(together)
    mean = together[is_known].mean() if is_known.any() else 0.0
    return np.where(np.isfinite(first), first, mean), np.where(np.isfinite(second), second, mean)
