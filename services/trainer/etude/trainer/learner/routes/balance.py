"""Balance of experts by the biases of their routers, without a loss.

After an update, the bias of each expert with less than the mean load of its layer grows by a rate,
and that of each with more falls by it. Biases change choices alone: weights come from the scores.
Source: https://arxiv.org/abs/2408.15664, as in DeepSeek-V3.

Shapes: M layers with experts, E experts of a layer.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from etude.common.api.meta import number
from etude.common.api.run.phases import Phase
from etude.common.api.run.router_replay import find_balance_problem
from etude.common.errors import InvalidFieldError
from etude.trainer.learner.optimiser import Update
from etude.trainer.learner.routes.load import ExpertLoad
from etude.trainer.model.parameters import StepObserver
from etude.trainer.model.policy import Policy


def check_balance(policy: Policy, phase: Phase) -> None:
    """Refuse a phase that is to balance experts which have no biases.

    Raises:
        InvalidFieldError: it is.
    """
    where = f"phase {phase.name}: optimizer.expertBiasRate"
    rate = phase.optimizer.expert_bias_rate
    problem = find_balance_problem(rate, has_lora=policy.lora is not None)
    if problem:
        raise InvalidFieldError(where, problem)
    if number(rate) and not policy.routers.biases:
        raise InvalidFieldError(
            where, "the routers of the model have no bias (e_score_correction_bias); remove it"
        )


def balance_update(
    policy: Policy, phase: Phase, load: ExpertLoad, update: Update, *, steps: StepObserver
) -> None:
    """Balance the experts of a policy after an update as its phase says; collective.

    Args:
        policy: that was updated.
        phase: under way.
        load: of the update.
        update: one that was left out moves no bias.
        steps: observer of the weights that change.
    """
    rate = number(phase.optimizer.expert_bias_rate)
    if rate and not update.is_skipped:
        balance_experts(policy, load.tokens(), rate=rate, steps=steps)


@torch.no_grad()
def balance_experts(policy: Policy, tokens: Tensor, *, rate: float, steps: StepObserver) -> None:
    """Move the biases of experts towards equal loads.

    Args:
        policy: with a bias in each router.
        tokens: of each expert in an update, on all ranks. [M, E]
        rate: by which a bias moves.
        steps: observer of the weights that change.
    """
    loads = tokens.double()
    directions = (loads.mean(-1, keepdim=True) - loads).sign()
    for name, direction in zip(policy.routers.biases, directions, strict=True):
        bias = policy.get_buffer(name)
        with steps.observe_step(name, bias) if steps.wants(name) else nullcontext():
            bias.add_(direction.to(bias), alpha=rate)
