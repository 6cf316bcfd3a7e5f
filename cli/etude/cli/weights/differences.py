"""Differences between two versions, tensor by tensor."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from etude.common.errors import Problem, UserError
from etude.common.weights.replicas.mirror import Mirror
from etude.common.weights.tensors import ulp
from etude.common.weights.tensors.schema import difference


class Difference(NamedTuple):
    """Of one tensor."""

    tensor: str
    elements: int
    changed: int
    """Elements with other bits."""
    one_ulp: int
    """Of these, how many became a neighbouring number."""
    largest: int
    """Greatest distance in ulps; 0 if nothing changed."""


def differences(one: Mirror, other: Mirror) -> Iterator[Difference]:
    """Compare two copies, tensor by tensor in the order of the schema.

    Raises:
        UserError: they are versions of different models.
        ValueError: one of them holds no version yet.
    """
    if one.schema is None or other.schema is None:
        raise ValueError("a copy holds no version yet")
    reason = difference(one.schema, other.schema)
    if reason:
        fix = "compare versions of one model"
        where = " and ".join(f"version {each.ref.version}" for each in (one, other) if each.ref)
        raise UserError(Problem("SchemaChanged", reason, where, fix))
    for spec in one.schema.tensors:
        before, after = one.tensor_words[spec.name], other.tensor_words[spec.name]
        at = np.flatnonzero(before != after)
        by = ulp.delta(before[at], after[at], ordered=spec.is_ordered)
        # Differences are modulo the word's range: the shorter way round is the distance.
        away = np.minimum(by, np.zeros((), by.dtype) - by)
        yield Difference(
            spec.name,
            spec.elements,
            int(at.size),
            int(np.count_nonzero(away == 1)),
            int(away.max(initial=0)),
        )
