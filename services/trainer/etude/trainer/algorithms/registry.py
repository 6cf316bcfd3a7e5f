"""Registry of algorithms: the one that a phase names, with checked parameters."""

from etude.common.api.run.algorithms import (
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


def build_algorithm(algorithm: Algorithm, *, max_tokens: int) -> AlgorithmSteps:
    """Build the algorithm of a phase, its parameters checked.

    Args:
        algorithm: as the phase gives it.
        max_tokens: longest rollout of the phase, for denominators that are not given.

    Raises:
        ValueError: a parameter is unknown, ignored or out of range.
        AssertionError: the algorithm is not implemented here.
    """
    parameters = check_algorithm(algorithm.name, algorithm.parameters)
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
