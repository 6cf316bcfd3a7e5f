"""Expert layers against a loop over tokens, with gradients; experts elsewhere add nothing."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from etude.kernels.experts import grouped_mm, moe_experts
from etude.kernels.routing import Router, Routes, route

TOKENS, HIDDEN, WIDTH, EXPERTS, CHOICES = 11, 16, 8, 5, 2


def by_token(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
    rows = []
    for token, (ids, weights) in enumerate(zip(routes.ids.tolist(), routes.weights, strict=True)):
        row = torch.zeros_like(x[token])
        for expert, weight in zip(ids, weights, strict=True):
            if 0 <= expert < len(gate_up):
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                row = row + weight * (down[expert] @ (silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


def layer(dtype: torch.dtype, *, hidden: int = HIDDEN) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, hidden), (EXPERTS, 2 * WIDTH, hidden), (EXPERTS, hidden, WIDTH)]
    return [torch.randn(s, generator=random, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize(
    ("dtype", "hidden", "tolerance"),
    [(torch.float64, HIDDEN, 1e-12), (torch.float32, HIDDEN, 1e-5), (torch.float32, 6, 1e-5)],
    ids=["double", "single", "sizes that torch refuses"],
)
def test_results_and_gradients_are_those_of_a_loop(
    dtype: torch.dtype, hidden: int, tolerance: float
) -> None:
    x, gate_up, down = layer(dtype, hidden=hidden)
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1), dtype=dtype)
    logits.requires_grad_()
    found = []
    for compute in (moe_experts, None):
        routes = route(logits, k=CHOICES, router=Router())
        if compute is None:
            result = by_token(x, routes, gate_up, down)
        else:
            result = compute(x, routes=routes, gate_up=gate_up, down=down)
        # A sum has a broadcast gradient, which torch's grouped product refuses.
        gradients = torch.autograd.grad(result.sum(), [x, gate_up, down, logits])
        found.append([result, *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_experts_elsewhere_add_nothing_and_an_idle_expert_has_a_gradient_of_zero() -> None:
    x, gate_up, down = layer(torch.float32)
    ids = torch.randint(0, 2, (TOKENS, 1), generator=torch.Generator().manual_seed(2))
    ids = torch.cat([ids, torch.full((TOKENS, 1), -1)], 1).to(torch.int32)
    ids[3] = EXPERTS
    routes = Routes(ids, torch.rand(TOKENS, 2), torch.zeros(()))
    result = moe_experts(x, routes=routes, gate_up=gate_up, down=down)
    torch.testing.assert_close(result, by_token(x, routes, gate_up, down), rtol=1e-5, atol=1e-5)
    assert not result[3].any()
    gradients = torch.autograd.grad(result.square().sum(), [x, gate_up, down])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][3].any()
    assert all(not gradient[2:].any() for gradient in gradients[1:])


def test_no_tokens_are_a_valid_batch() -> None:
    _, gate_up, down = layer(torch.float32)
    routes = route(torch.zeros(0, EXPERTS), k=CHOICES, router=Router())
    x = torch.zeros(0, HIDDEN, requires_grad=True)
    result = moe_experts(x, routes=routes, gate_up=gate_up, down=down)
    assert result.shape == (0, HIDDEN)
    [gradient] = torch.autograd.grad(result.sum(), [gate_up])
    assert not gradient.any()


def test_wrong_shapes_are_refused_by_name() -> None:
    x, gate_up, down = layer(torch.float32)
    routes = route(torch.zeros(TOKENS, EXPERTS), k=CHOICES, router=Router())
    with pytest.raises(ValueError, match="but down"):
        moe_experts(x, routes=routes, gate_up=gate_up, down=down.transpose(1, 2))
    with pytest.raises(ValueError, match="routes have"):
        moe_experts(x[:3], routes=routes, gate_up=gate_up, down=down)
    offs = torch.zeros(EXPERTS, dtype=torch.int32)
    with pytest.raises(ValueError, match="a is"):
        grouped_mm(x, gate_up[:, :8], offs=offs)
    with pytest.raises(ValueError, match="offs is"):
        grouped_mm(x, gate_up.transpose(1, 2), offs=offs.long())
    with pytest.raises(ValueError, match="one type"):
        grouped_mm(x.double(), gate_up.transpose(1, 2), offs=offs)
