"""Choice of the experts of each token, from the router's logits or replayed.

The computation is torch's on every device; no Triton body exists yet.
Shapes: T tokens, E experts, k choices of a token, G groups of experts.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

MISSING = -1
"""Id of a choice that was not recorded."""
_EPSILON = 1e-20
"""Added to the sum of sigmoids, as DeepSeek's own router does."""


class Scoring(StrEnum):
    """Function from logits to scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Rule of a model by which scores become choices and weights."""

    scoring: Scoring = Scoring.SOFTMAX
    renormalises: bool = True
    """True if the weights of a token add up to `scale`."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Experts are chosen within the best groups of as many equal ones."""
    chosen_groups: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.chosen_groups <= self.groups:
            raise ValueError(
                f"chosen_groups is {self.chosen_groups}: it is at least 1, at most {self.groups}"
            )


class Routes(NamedTuple):
    """Experts of each token."""

    ids: Tensor
    """int32. [T, k]"""
    weights: Tensor
    """float32 or float64, differentiable in the logits. [T, k]"""
    replaced: Tensor
    """Number of tokens whose replayed row was missing or invalid, and was routed live. int32 []"""


def route(
    logits: Tensor,
    *,
    k: int,
    router: Router,
    bias: Tensor | None = None,
    replay: Tensor | None = None,
    plausibility: float = 0.0,
) -> Routes:
    """Choose the experts of each token.

    Choices are ordered by score, then by lower id. Only ids are replayed: weights are computed from
    the live logits, so gradients reach the router through every expert that is used.

    Args:
        logits: of the router. [T, E]
        k: choices of a token.
        router: rule of the model.
        bias: added to scores for the choice, never to weights. [E]
        replay: ids to use; a row with one that is missing, out of range or repeated is routed
            live. int [T, k]
        plausibility: an id is replayed only if its score is at least this part of the k-th best
            live score; the best unused experts take the places of others. 0 replays every id, 1
            none that the live router would not choose.

    Raises:
        ValueError: a shape, a type or a number is wrong.
    """
    _check_arguments(logits, k, router, bias, replay, plausibility)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    is_softmax = router.scoring is Scoring.SOFTMAX
    scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
    preference = _preference(logits.detach(), scores.detach(), router, bias)
    order = _descending_order(preference)
    replaced = torch.zeros((), dtype=torch.int32, device=logits.device)
    if replay is not None:
        usable = _usable_rows(replay, logits.shape[1])
        replaced = (~usable).sum(dtype=torch.int32)
        kept = _replayed_experts(replay, usable, logits.shape[1])
        if plausibility > 0:
            # Softmax is compared in logits, where a ratio is a difference: exact at 1.
            in_logits = is_softmax and bias is None and router.groups == 1
            worst = preference.gather(1, order[:, k - 1 : k])
            kept &= preference >= _lower_bound(worst, plausibility, in_logits=in_logits)
        first = (~kept.gather(1, order)).byte().argsort(dim=1, stable=True)[:, :k]
        order = order.gather(1, first.sort(dim=1).values)
    ids = order[:, :k]
    return Routes(ids.to(torch.int32), _weigh_experts(scores, ids, router), replaced)


def _weigh_experts(scores: Tensor, ids: Tensor, router: Router) -> Tensor:
    """Compute the weights of chosen experts, [T, k]."""
    weights = scores.gather(1, ids)
    if router.renormalises:
        epsilon = 0 if router.scoring is Scoring.SOFTMAX else _EPSILON
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
    return weights * router.scale


def _lower_bound(worst: Tensor, plausibility: float, *, in_logits: bool) -> Tensor:
    """Least preference of a replayed expert, from that of the k-th best live one. [T, 1]."""
    return worst + math.log(plausibility) if in_logits else worst * plausibility


def _preference(logits: Tensor, scores: Tensor, router: Router, bias: Tensor | None) -> Tensor:
    """Order in which a token takes experts: the greatest first. [T, E]."""
    if bias is None and router.groups == 1:
        return logits if router.scoring is Scoring.SOFTMAX else scores
    biased = scores if bias is None else scores + bias
    if router.groups == 1:
        return biased
    grouped = biased.view(len(biased), router.groups, biased.shape[1] // router.groups)
    best = min(2, grouped.shape[2]) if bias is not None else 1
    of_group = grouped.topk(best, dim=-1).values.sum(-1)
    chosen = _descending_order(of_group)[:, : router.chosen_groups]
    is_chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, chosen, value=True)
    return grouped.masked_fill(~is_chosen[:, :, None], -math.inf).view_as(biased)


def _descending_order(values: Tensor) -> Tensor:
    """Indices by value, then by lower index; NaN comes last. [T, E]."""
    is_nan = values.isnan()
    order = values.masked_fill(is_nan, -math.inf).argsort(dim=1, descending=True, stable=True)
    return order.gather(1, is_nan.gather(1, order).byte().argsort(dim=1, stable=True))


def _usable_rows(replay: Tensor, num_experts: int) -> Tensor:
    """True for rows whose ids exist and differ. [T]."""
    ordered = replay.sort(dim=1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    return ~repeated & (replay >= 0).all(1) & (replay < num_experts).all(1)


def _replayed_experts(replay: Tensor, usable: Tensor, num_experts: int) -> Tensor:
    """True for the experts that a usable row names. [T, E]."""
    named = torch.zeros(len(replay), num_experts, dtype=torch.bool, device=replay.device)
    return named.scatter_(1, replay.clamp(0, num_experts - 1).long(), value=True) & usable[:, None]


def _check_arguments(
    logits: Tensor,
    k: int,
    router: Router,
    bias: Tensor | None,
    replay: Tensor | None,
    plausibility: float,
) -> None:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits is {logits.dtype} {tuple(logits.shape)}: it is float [T, E]")
    tokens, experts = logits.shape
    if experts % router.groups:
        raise ValueError(f"router.groups is {router.groups}: it divides the {experts} experts")
    choosable = experts // router.groups * router.chosen_groups
    if not 1 <= k <= choosable:
        raise ValueError(f"k is {k}: it is at least 1, at most {choosable}")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias is {tuple(bias.shape)}: it is [{experts}]")
    if not 0 <= plausibility <= 1:
        raise ValueError(f"plausibility is {plausibility}: it is from 0 to 1")
    if replay is not None and (
        replay.shape != (tokens, k) or replay.is_floating_point() or replay.dtype == torch.bool
    ):
        raise ValueError(
            f"replay is {replay.dtype} {tuple(replay.shape)}: it is integers [{tokens}, {k}]"
        )
