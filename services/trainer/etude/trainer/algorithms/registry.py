"""Registry of algorithms: the one that a phase names, with checked parameters."""

from etude.common.api.run.algorithms import (
    AlgorithmParameters,
    Correction,
    DrGRPOParameters,
    GRPOParameters,
    RLOOParameters,
    check_algorithm,
)
from etude.common.api.run.phases import Algorithm
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.drgrpo import DrGRPO
from etude.trainer.algorithms.grpo import GRPO
from etude.trainer.algorithms.rloo import RLOO

STALE_CORRECTION = Correction(kind="TIS", high=2.0)
"""Correction of a phase that trains tokens of older weights and gives neither correction nor clip.

A clip alone bounds one side: for a negative advantage, min(r A, clip(r) A) grows with r."""


def build_algorithm(
    algorithm: Algorithm, *, max_tokens: int, max_staleness: int = 0
) -> AlgorithmSteps:
    """Build the algorithm of a phase, its parameters checked.

    Args:
        algorithm: as the phase gives it.
        max_tokens: most tokens that a rollout of the phase trains, for denominators that are not
            given.
        max_staleness: versions by which trained tokens may be older than the weights.

    Raises:
        ValueError: a parameter is unknown, ignored or out of range.
        AssertionError: the algorithm is not implemented here.
    """
    parameters = check_algorithm(algorithm.name, algorithm.parameters)
    if max_staleness and not parameters.model_fields_set & {"correction", "clip_low", "clip_high"}:
        parameters = correct_stale_tokens(parameters)
    match parameters:
        case DrGRPOParameters():
            scale = parameters.loss_scale or float(max_tokens)
            return DrGRPO(parameters=parameters, loss_scale=scale)
        case GRPOParameters():
            return GRPO(parameters=parameters)
        case RLOOParameters():
            scale = parameters.loss_scale or float(max_tokens)
            return RLOO(parameters=parameters, loss_scale=scale)
        case _:
            raise AssertionError(f"{algorithm.name} is not implemented")


def correct_stale_tokens(parameters: AlgorithmParameters) -> AlgorithmParameters:
    """Replace the correction by the default of phases that train tokens of older weights."""
    return parameters.model_copy(update={"correction": STALE_CORRECTION})
