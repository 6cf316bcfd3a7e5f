"""Routing: the choices of each family's own router, and replayed ones under a live router."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from etude.kernels.routing import Router, Scoring, route

EXAMPLES = settings(max_examples=50, deadline=None)
SOFTMAX = Router()
SIGMOID = Router(scoring=Scoring.SIGMOID, scale=2.5)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_logits(seed: int, tokens: int, experts: int) -> Tensor:
    return torch.randn(tokens, experts, generator=generator(seed), dtype=torch.float64)


def draw_ids(seed: int, tokens: int, experts: int, k: int) -> Tensor:
    noise = torch.rand(tokens, experts, generator=generator(seed))
    return noise.argsort(1)[:, :k].to(torch.int32)


def test_choices_and_weights_are_those_of_qwen3() -> None:
    for norms in (True, False):
        config = Qwen3MoeConfig(
            hidden_size=16, num_experts=12, num_experts_per_tok=3, norm_topk_prob=norms
        )
        torch.manual_seed(0)
        module: Any = Qwen3MoeTopKRouter(config)
        torch.nn.init.normal_(module.weight)
        logits, weights, ids = module(torch.randn(50, 16))
        found = route(logits, k=3, router=Router(renormalises=norms))
        assert torch.equal(found.ids.long(), ids)
        torch.testing.assert_close(found.weights, weights)


def test_choices_and_weights_are_those_of_deepseek() -> None:
    config = DeepseekV3Config(
        hidden_size=16,
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    torch.manual_seed(0)
    module: Any = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(module.weight)
    module.e_score_correction_bias.normal_(std=0.3)
    logits, weights, ids = module(torch.randn(50, 16))
    router = Router(scoring=Scoring.SIGMOID, scale=2.5, groups=4, chosen_groups=2)
    found = route(logits, k=4, router=router, bias=module.e_score_correction_bias)
    assert torch.equal(found.ids.long().sort(1).values, ids.sort(1).values)
    for ours, theirs in ((found.weights, weights),):
        torch.testing.assert_close(ours.sort(1).values, theirs.sort(1).values)


def test_ties_go_to_the_lower_id_and_nan_comes_last() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, 1.0, 1.0, -0.0], [nan, -inf, 2.0, -inf]])
    assert route(logits, k=3, router=SOFTMAX).ids.tolist() == [[1, 2, 0], [2, 1, 3]]


@EXAMPLES
@given(seed=st.integers(0, 2**31), k=st.integers(1, 4), experts=st.integers(4, 9))
def test_replayed_weights_are_the_softmax_over_the_replayed_experts(
    seed: int, k: int, experts: int
) -> None:
    logits = draw_logits(seed, 6, experts).requires_grad_()
    replay = draw_ids(seed + 1, 6, experts, k)
    found = route(logits, k=k, router=SOFTMAX, replay=replay)
    assert torch.equal(found.ids.sort(1).values, replay.sort(1).values)
    assert found.replaced == 0
    hidden = torch.ones(6, experts, dtype=torch.bool).scatter_(1, replay.long(), value=False)
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(found.weights, expected.gather(1, found.ids.long()))
    # Through the weights, gradients reach the logits of exactly the experts that are used.
    part = torch.rand(6, k, generator=generator(seed + 2), dtype=torch.float64)
    [ours] = torch.autograd.grad((found.weights * part).sum(), logits)
    chosen = expected.gather(1, found.ids.long())
    [theirs] = torch.autograd.grad((chosen * part).sum(), logits)
    torch.testing.assert_close(ours, theirs)
    assert (ours.masked_select(~hidden) != 0).all() or k == 1


@EXAMPLES
@given(seed=st.integers(0, 2**31), router=st.sampled_from([SOFTMAX, SIGMOID]))
def test_replaying_what_was_recorded_gives_the_same_gradient(seed: int, router: Router) -> None:
    logits = draw_logits(seed, 5, 8).requires_grad_()
    live = route(logits, k=3, router=router)
    again = route(logits, k=3, router=router, replay=live.ids)
    gradients = [torch.autograd.grad(r.weights.square().sum(), logits)[0] for r in (live, again)]
    assert torch.equal(live.ids, again.ids)
    assert torch.equal(*gradients)


@EXAMPLES
@given(seed=st.integers(0, 2**31), router=st.sampled_from([SOFTMAX, SIGMOID]))
def test_plausibility_of_one_is_the_live_router(seed: int, router: Router) -> None:
    logits = draw_logits(seed, 8, 6)
    replay = draw_ids(seed + 1, 8, 6, 3)
    found = route(logits, k=3, router=router, replay=replay, plausibility=1.0)
    assert torch.equal(found.ids, route(logits, k=3, router=router).ids)


@EXAMPLES
@given(seed=st.integers(0, 2**31), alpha=st.floats(0.01, 0.99))
def test_implausible_experts_make_place_for_the_best_unused_ones(seed: int, alpha: float) -> None:
    logits = draw_logits(seed, 8, 6)
    replay = draw_ids(seed + 1, 8, 6, 3)
    found = route(logits, k=3, router=SOFTMAX, replay=replay, plausibility=alpha)
    scores = logits.softmax(-1)
    for row in range(8):
        floor = alpha * float(scores[row].topk(3).values[-1])
        kept = [int(i) for i in replay[row] if float(scores[row, i]) >= floor]
        rest = [int(i) for i in scores[row].argsort(descending=True) if int(i) not in kept]
        assert set(found.ids[row].tolist()) == set(kept + rest[: 3 - len(kept)])


@pytest.mark.parametrize("row", [[-1, -1], [0, -1], [2, 2], [0, 4], [255, 255]])
def test_a_row_that_cannot_be_replayed_is_routed_live_and_counted(row: list[int]) -> None:
    logits = draw_logits(0, 2, 4)
    replay = torch.tensor([row, [3, 0]], dtype=torch.int32)
    found = route(logits, k=2, router=SOFTMAX, replay=replay)
    assert found.ids[0].tolist() == route(logits, k=2, router=SOFTMAX).ids[0].tolist()
    assert set(found.ids[1].tolist()) == {0, 3}
    assert found.replaced == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"logits": torch.zeros(4)}, "logits"),
        ({"k": 5}, "k is 5"),
        ({"k": 0}, "k is 0"),
        ({"router": Router(groups=3, chosen_groups=1)}, "router.groups is 3"),
        ({"bias": torch.zeros(3)}, "bias"),
        ({"replay": torch.zeros(2, 3, dtype=torch.int32)}, "replay"),
        ({"replay": torch.zeros(2, 2)}, "replay"),
        ({"plausibility": 1.5}, "plausibility is 1.5"),
        ({"plausibility": float("nan")}, "plausibility is nan"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, Any], field: str) -> None:
    arguments: dict[str, Any] = {"logits": torch.zeros(2, 4), "k": 2, "router": SOFTMAX} | change
    with pytest.raises(ValueError, match=field):
        route(arguments.pop("logits"), **arguments)


def test_more_chosen_groups_than_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="chosen_groups is 3"):
        Router(groups=2, chosen_groups=3)
