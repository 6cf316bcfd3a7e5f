"""Expert layers of a mixture: one matrix product per expert over the tokens that chose it.

The computation is torch's on every device; no Triton body exists yet.
Shapes: T tokens, H hidden size, I width of an expert, E experts, k choices of a token, R = T * k.
"""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm as torch_grouped_mm
from torch.nn.functional import silu
from typing_extensions import override

from etude.kernels.routing import Routes

_ALIGNMENT_BYTES = 16
"""Of the rows that torch's grouped product takes."""


class _Contiguous(torch.autograd.Function):
    """Identity whose gradient is contiguous, as torch's grouped product needs it."""

    @override
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.view_as(value)

    @override
    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def grouped_mm(a: Tensor, w: Tensor, *, offs: Tensor) -> Tensor:
    """Multiply consecutive rows by the matrix of their expert; differentiable.

    Rows behind the last end have no expert: their results are undefined, as torch's.

    Args:
        a: rows, in the order of their experts. [R, K]
        w: one matrix per expert, of the same type. [E, K, N]
        offs: end of each expert's rows. int32 [E]

    Raises:
        ValueError: a shape or a type is wrong.

    Returns:
        [R, N]
    """
    if a.ndim != 2 or w.ndim != 3 or a.shape[1] != w.shape[1]:
        raise ValueError(f"a is {tuple(a.shape)}, w {tuple(w.shape)}: they are [R, K], [E, K, N]")
    if offs.dtype != torch.int32 or offs.shape != w.shape[:1]:
        raise ValueError(f"offs is {offs.dtype} {tuple(offs.shape)}: it is int32 [{len(w)}]")
    if a.dtype != w.dtype:
        raise ValueError(f"a is {a.dtype}, w {w.dtype}: they have one type")
    if _torch_takes(a, w):
        product: Tensor = _Contiguous.apply(torch_grouped_mm(a, w, offs=offs))  # type: ignore[no-untyped-call]
        return product
    return _products(a, w, offs)


def moe_experts(x: Tensor, *, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sum of the chosen experts' SwiGLU layers, each times its weight; differentiable.

    Ids that are negative, or not below E, are of experts elsewhere and add nothing.

    Args:
        x: tokens. [T, H]
        routes: ids and weights. [T, k] each
        gate_up: gate rows above up rows. [E, 2I, H]
        down: [E, H, I]

    Raises:
        ValueError: a shape or a type is wrong.

    Returns:
        [T, H]
    """
    experts, k = len(gate_up), routes.ids.shape[1]
    if routes.ids.shape != (len(x), k) or routes.weights.shape != routes.ids.shape:
        raise ValueError(f"routes have {tuple(routes.ids.shape)}: they are [{len(x)}, k] each")
    if down.shape != (experts, gate_up.shape[2], gate_up.shape[1] // 2):
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}, but down {tuple(down.shape)}")
    flat = routes.ids.flatten()
    is_local = (flat >= 0) & (flat < experts)
    ordered, row = torch.where(is_local, flat, experts).sort(stable=True)
    offs = torch.searchsorted(
        ordered, torch.arange(experts, device=x.device, dtype=ordered.dtype), right=True
    ).to(torch.int32)
    # Rows of experts elsewhere lie at the end, where results and gradients are undefined.
    is_row = (ordered < experts)[:, None]
    taken = torch.where(is_row, x[row // k].to(gate_up.dtype), 0)
    gate, up = grouped_mm(taken, gate_up.transpose(1, 2), offs=offs).chunk(2, dim=-1)
    hidden = torch.where(is_row, silu(gate) * up, 0)
    result = torch.where(is_row, grouped_mm(hidden, down.transpose(1, 2), offs=offs), 0)
    weighted = result * routes.weights.flatten()[row, None].to(result.dtype)
    # Back in the order of tokens and choices, so that the sum has one order.
    place = torch.empty_like(row).scatter_(0, row, torch.arange(len(row), device=x.device))
    return weighted[place].view(len(x), k, x.shape[1]).sum(1).to(x.dtype)


def _torch_takes(a: Tensor, w: Tensor) -> bool:
    if a.dtype not in {torch.float32, torch.bfloat16, torch.float16}:
        return False
    sizes = (a.shape[1], w.shape[2])
    return all(size * a.element_size() % _ALIGNMENT_BYTES == 0 for size in sizes) and a.numel() > 0


def _products(a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Compute one product per expert, for types and sizes that torch's grouped one refuses."""
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    parts = [a[start:end] @ w[i] for i, (start, end) in enumerate(zip(starts, ends, strict=True))]
    rest = a.new_zeros(len(a) - (ends[-1] if ends else 0), w.shape[2])
    return torch.cat([*parts, rest])
