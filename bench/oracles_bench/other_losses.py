"""`python other_losses.py`: gradients of verl, TRL and OpenRLHF for cases from standard input.

Run by the Python of their environment, which has nothing of this project. Reads one JSON object a
line, and prints the gradients by the name of the code base.
Shapes: B rollouts, T tokens of the longest.
"""

import importlib.util
import json
import sys
import types
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl import GRPOTrainer
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig

NO_LIMIT = 1e9
CONSTANT = "seq-mean-token-sum-norm"

VERL = {
    "DrGRPO": ("vanilla", CONSTANT, 0.2, 0.28),
    "GRPO": ("vanilla", "seq-mean-token-mean", 0.2, 0.2),
    "RLOO": ("cispo", CONSTANT, 1.0, NO_LIMIT),
    "PPO": ("vanilla", "token-mean", 0.2, 0.2),
    "DAPO": ("vanilla", "token-mean", 0.2, 0.28),
    "GSPO": ("gspo", "seq-mean-token-mean", 0.05, 0.08),
    "CISPO": ("cispo", "token-mean", 1.0, 0.28),
    "DPPO": ("dppo_tv", "token-mean", 0.1, 0.1),
    "SAPO": ("sapo", "seq-mean-token-mean", 0.2, 0.2),
}
"""Loss, aggregation and clips by formula; others are PPO with a correction."""

TRL = {
    "DrGRPO": ("dr_grpo", "token", 0.2, 0.28),
    "GRPO": ("grpo", "token", 0.2, 0.2),
    "RLOO": ("cispo", "token", 0.2, NO_LIMIT),
    "PPO": ("bnpo", "token", 0.2, 0.2),
    "DAPO": ("dapo", "token", 0.2, 0.28),
    "GSPO": ("grpo", "sequence", 0.05, 0.08),
    "CISPO": ("cispo", "token", 0.2, 1.28),
    "SAPO": ("sapo", "token", 0.2, 0.2),
    "DecoupledPPO": ("bnpo", "token", 0.2, 0.2),
    "OPSM": ("bnpo", "token", 0.2, 0.2),
}
"""Loss, level of the ratio and bounds by formula."""

OPENRLHF: dict[str, dict[str, Any]] = {
    "PPO": {},
    "GRPO": {"token_level_loss": False},
    "DAPO": {"clip_eps_high": 0.28},
    "GSPO": {"policy_loss_type": "gspo", "clip_eps_low": 0.05, "clip_eps_high": 0.08},
    "DecoupledPPO": {"level": "token", "mode": "clip", "threshold": [0.0, NO_LIMIT]},
    "TIS": {"level": "token", "mode": "clip", "threshold": [0.0, 1.05]},
    "IcePop": {"level": "token", "mode": "mask", "threshold": [0.95, 1.05]},
    "SequenceMaskTIS": {"level": "seq", "mode": "mask", "threshold": [0.97, 1.03]},
}
"""Options of the loss by formula."""

EMPTY_ROWS_COUNT = {"DrGRPO", "GRPO", "GSPO", "SAPO"}
"""Formulas whose denominators count rollouts: TRL counts those without a trained token too."""


def _load_openrlhf() -> types.ModuleType:
    """Load the file of losses alone; the package would import DeepSpeed."""
    spec = importlib.util.find_spec("openrlhf")
    folder = Path(spec.submodule_search_locations[0])  # type: ignore[union-attr, index]
    utils = types.ModuleType("openrlhf_models.utils")

    def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
        return (tensor * mask).sum(dim=dim) / mask.sum(dim=dim)

    utils.masked_mean = masked_mean  # type: ignore[attr-defined]
    sys.modules["openrlhf_models"] = types.ModuleType("openrlhf_models")
    sys.modules["openrlhf_models.utils"] = utils
    file = importlib.util.spec_from_file_location("openrlhf_models.loss", folder / "models/loss.py")
    module = importlib.util.module_from_spec(file)  # type: ignore[arg-type]
    file.loader.exec_module(module)  # type: ignore[union-attr]
    return module


openrlhf_loss = _load_openrlhf()


class Case:
    """Tensors of one case."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.formula: str = given["formula"]
        self.logprobs = _tensor(given["logprobs"]).requires_grad_()
        self.proximal = _tensor(given["proximal"])
        self.sampler = _tensor(given["sampler"])
        self.mask = torch.tensor(given["mask"])
        self.advantages = _tensor(given["advantages"])[:, None].expand_as(self.proximal)
        self.given = given

    @property
    def weight(self) -> Tensor:
        return self.mask.double()


def _tensor(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def verl_loss(case: Case) -> Tensor | None:
    """Loss by verl, with its own advantages where the case has rewards."""
    name, aggregation, low, high = VERL.get(case.formula, VERL["PPO"])
    if case.formula == "OPSM":
        return None
    config = ActorConfig(
        strategy="fsdp",
        ppo_mini_batch_size=4,
        ppo_micro_batch_size_per_gpu=4,
        rollout_n=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=20.0 if name == "dppo_tv" else NO_LIMIT,
    )
    loss: Tensor
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=case.proximal,
        log_prob=case.logprobs,
        advantages=_verl_advantages(case),
        response_mask=case.weight,
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=_verl_weights(case),
    )
    if case.formula == "logRatioPenalty":
        penalty = core_algos.kl_penalty(case.logprobs, case.sampler, "k2")
        loss = loss + 2 * 0.1 * core_algos.agg_loss(penalty, case.weight, "token-mean")
    return loss


def _verl_advantages(case: Case) -> Tensor:
    if case.given["rewards"] is None:
        return case.advantages
    rewards = torch.zeros_like(case.proximal)
    rewards[:, 0] = _tensor(case.given["rewards"])
    index = np.array(case.given["groups"])
    whole = torch.ones_like(case.proximal)  # so that a row without tokens is in its group's mean
    found: Tensor
    if case.formula == "RLOO":
        found, _ = core_algos.compute_rloo_outcome_advantage(rewards, whole, index)
        return found
    is_divided = case.formula in {"GRPO", "DAPO"}
    found, _ = core_algos.compute_grpo_outcome_advantage(
        rewards, whole, index, norm_adv_by_std_in_grpo=is_divided
    )
    return found


def _verl_weights(case: Case) -> Tensor | None:
    log_ratio, mask = case.proximal - case.sampler, case.weight
    bounds: dict[str, float | str] = {"TIS": 1.05, "IcePop": "0.95_1.05"}
    if case.formula in {"DecoupledPPO", "SequenceMaskTIS", *bounds}:
        limit = bounds.get(case.formula, NO_LIMIT)
        weights: Tensor
        weights, _ = compute_rollout_correction_weights(
            log_ratio, mask, rollout_is="token", rollout_is_threshold=limit
        )
        if case.formula == "SequenceMaskTIS":
            kept, _ = compute_rollout_rejection_mask(
                log_ratio,
                mask,
                rollout_rs="seq_mean_k1",  # of the sampler's ratio to the policy: the reciprocal
                rollout_rs_threshold=f"{1 / 1.03!r}_{1 / 0.97!r}",
            )
            weights = weights * kept
        return weights
    return None


def trl_loss(case: Case) -> Tensor | None:
    """Loss by TRL's trainer, of which only what the loss reads is there."""
    if case.formula not in TRL or (
        case.formula in EMPTY_ROWS_COUNT and bool((case.mask.sum(1) == 0).any())
    ):
        return None
    loss_type, level, low, high = TRL[case.formula]
    weights = (case.proximal - case.sampler).exp()
    is_weighted = case.formula == "DecoupledPPO"
    items = case.mask.sum()
    if case.formula == "RLOO":  # a constant denominator
        items = (case.mask.sum(1) > 0).sum() * case.mask.shape[1]
    inputs = {
        "prompt_ids": torch.zeros_like(case.mask, dtype=torch.int64),
        "prompt_mask": case.weight,
        "completion_ids": torch.zeros_like(case.mask, dtype=torch.int64),
        "completion_mask": case.weight,
        "advantages": case.advantages[:, 0],
        "old_per_token_logps": case.sampler if case.formula == "OPSM" else case.proximal,
        "sampling_per_token_logps": case.sampler,
        "num_items_in_batch": items.double(),
        "importance_sampling_ratio": weights,
    }
    trainer = _trl_trainer(case, loss_type, level, low, high)
    trainer.use_vllm = is_weighted
    trainer.off_policy_mask_threshold = 0.02 if case.formula == "OPSM" else None
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def _trl_trainer(
    case: Case, loss_type: str, level: str, low: float, high: float
) -> SimpleNamespace:
    def same(value: Tensor, **_: object) -> Tensor:
        return value

    return SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        beta=0.0,
        top_entropy_quantile=1.0,
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        max_completion_length=case.mask.shape[1],
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            # As tensors: Python numbers would become float32.
            sapo_temperature_pos=torch.tensor(1.0, dtype=torch.float64),
            sapo_temperature_neg=torch.tensor(1.05, dtype=torch.float64),
        ),
        accelerator=SimpleNamespace(
            num_processes=1, gather=same, gather_for_metrics=same, reduce=same
        ),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            case.logprobs,
            torch.zeros_like(case.proximal),
            None,
        ),
    )


def openrlhf_policy_loss(case: Case) -> Tensor | None:
    """Loss by OpenRLHF."""
    if case.formula not in OPENRLHF:
        return None
    options = dict(OPENRLHF[case.formula])
    names = ("level", "mode", "threshold")
    renamed = {f"is_correction_{name}": options.pop(name) for name in names if name in options}
    loss, *_ = openrlhf_loss.PolicyLoss(**options, **renamed)(
        case.logprobs,
        case.proximal,
        case.advantages,
        action_mask=case.weight,
        rollout_log_probs=case.sampler,
    )
    found: Tensor = loss
    return found


LOSSES = {"verl": verl_loss, "TRL": trl_loss, "OpenRLHF": openrlhf_policy_loss}


def main() -> None:
    """Answer each case with the gradients of those that have its formula."""
    for line in sys.stdin:
        given = json.loads(line)
        answer = {}
        for name, loss_of in LOSSES.items():
            case = Case(given)
            loss = loss_of(case)
            if loss is not None:
                (gradient,) = torch.autograd.grad(loss, case.logprobs)
                answer[name] = torch.where(case.mask, gradient, 0.0).tolist()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
