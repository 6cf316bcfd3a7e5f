"""Registry of algorithms: the one that a phase names, with checked parameters."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from etude.common.api.run.algorithms import (
    AlgorithmParameters,
    CISPOParameters,
    CorrectedParameters,
    Correction,
    DAPOParameters,
    DecoupledPPOParameters,
    DPPOParameters,
    DrGRPOParameters,
    GRPOParameters,
    GSPOParameters,
    PPOParameters,
    RLOOParameters,
    SAPOParameters,
    check_algorithm,
)
from etude.common.api.run.phases import Algorithm
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.cispo import CISPO
from etude.trainer.algorithms.dapo import DAPO
from etude.trainer.algorithms.decoupled_ppo import DecoupledPPO
from etude.trainer.algorithms.dppo import DPPO
from etude.trainer.algorithms.drgrpo import DrGRPO
from etude.trainer.algorithms.grpo import GRPO
from etude.trainer.algorithms.gspo import GSPO
from etude.trainer.algorithms.ppo import PPO
from etude.trainer.algorithms.rloo import RLOO
from etude.trainer.algorithms.sapo import SAPO

STALE_CORRECTION = Correction(kind="TIS", high=2.0)
"""Correction of a phase that trains tokens of older weights and gives neither correction nor clip.

A clip alone bounds one side: for a negative advantage, min(r A, clip(r) A) grows with r."""


BUILDERS: Mapping[type[AlgorithmParameters], Callable[..., AlgorithmSteps]] = MappingProxyType(
    {
        GRPOParameters: GRPO,
        PPOParameters: PPO,
        DAPOParameters: DAPO,
        GSPOParameters: GSPO,
        CISPOParameters: CISPO,
        DPPOParameters: DPPO,
        SAPOParameters: SAPO,
        DecoupledPPOParameters: DecoupledPPO,
    }
)
"""Algorithms that need nothing but their parameters."""


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
    """
    parameters = check_algorithm(algorithm.name, algorithm.parameters)
    if max_staleness:
        parameters = correct_stale_tokens(parameters)
    match parameters:
        case DrGRPOParameters():
            scale = parameters.loss_scale or float(max_tokens)
            return DrGRPO(parameters=parameters, loss_scale=scale)
        case RLOOParameters():
            scale = parameters.loss_scale or float(max_tokens)
            return RLOO(parameters=parameters, loss_scale=scale)
        case _:
            return BUILDERS[type(parameters)](parameters=parameters)


def correct_stale_tokens(parameters: AlgorithmParameters) -> AlgorithmParameters:
    """Give parameters the correction of phases that train tokens of older weights.

    Those that have chosen one keep theirs. So do those that have chosen a trust region while there
    is one update per batch: with a correction it would not act.
    """
    if not isinstance(parameters, CorrectedParameters):
        return parameters
    chosen = {"correction"}
    if parameters.updates_per_batch == 1:
        chosen |= set(parameters.trust_region)
    if parameters.model_fields_set & chosen:
        return parameters
    return parameters.model_copy(update={"correction": STALE_CORRECTION})
