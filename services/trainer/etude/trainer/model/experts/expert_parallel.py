"""Expert parallel: ranks that divide the experts of each layer, and exchange rows for results.

A rank sends each of its tokens, once per choice, to the rank of the expert, computes the rows that
it gets for its own experts, and weights and adds up the results that come back. Routers and all
else stay with the tokens. Gradients take the same ways back, so that an expert's gradient is the
sum over the tokens of the whole group; FSDP adds up those of the other groups.
Source: GShard, https://arxiv.org/abs/2006.16668.

Shapes: T tokens of this rank, H hidden size, E experts of a layer, k choices of a token, G ranks of
the group, L = E / G, R rows.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PretrainedConfig
from transformers.activations import SiLUActivation
from transformers.integrations import moe
from typing_extensions import override

from etude.common.errors import InvalidFieldError
from etude.kernels.experts import moe_experts
from etude.kernels.routing import Routes
from etude.trainer.model.parameters import local_shard

_FIELD = "roles.trainer.mesh.expert"
_STACKS = ("gate_up_proj", "down_proj")
"""Parameters of the experts of a layer. [E, 2I, H], [E, H, I]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroup:
    """This rank among those that divide the experts of each layer."""

    size: int = 1
    axis: DeviceMesh | None = None
    """The ranks of the group; None for a single rank."""
    shards: DeviceMesh | None = None
    """Axes over which FSDP cuts a part of the experts, and copies it."""
    is_balanced: bool = False
    """True if each rank is taken to get an equal number of rows, as a pass without values needs."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Over which rows are exchanged."""
        return None if self.axis is None else self.axis.get_group()


ALL_EXPERTS = ExpertGroup()
"""One rank with all experts."""


class _Exchange(NamedTuple):
    """Rows that a rank sends and gets in one pass through a layer."""

    sent: list[int]
    """Number for each rank. [G]"""
    received: list[int]
    """[G]"""
    experts: Tensor
    """Index of the expert of each row that is received, among those of this rank."""


def count_experts(config: PretrainedConfig) -> int:
    """Number of the routed experts of a layer; 0 for a dense model."""
    text = config.get_text_config()
    return getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0


def check_experts(config: PretrainedConfig, size: int) -> None:
    """Check that ranks can divide the experts of a model.

    Args:
        config: of the model.
        size: number of ranks that divide them.

    Raises:
        InvalidFieldError: they cannot.
    """
    experts = count_experts(config)
    if size > 1 and not experts:
        raise InvalidFieldError(_FIELD, f"{config.model_type} has no experts to divide; set 1")
    if experts % size:
        raise InvalidFieldError(
            _FIELD, f"{experts} experts of a layer cannot be divided by {size} ranks evenly"
        )


def divide_experts(model: nn.Module, group: ExpertGroup) -> list[nn.Module]:
    """Leave this rank its part of the experts of each layer, which FSDP is to cut further.

    Raises:
        InvalidFieldError: the experts are in a form that cannot be divided.

    Returns:
        The modules with the experts.
    """
    if group.axis is None:
        return []
    found = [module for module in model.modules() if _is_divisible(module)]
    if not found:
        what = f"the experts of {type(model).__name__} are not stacked SwiGLU layers without biases"
        raise InvalidFieldError(_FIELD, f"{what}, which alone can be divided; set 1")
    for experts in found:
        for name in _STACKS:
            whole = experts.get_parameter(name)
            part = whole.detach().chunk(group.size)[group.axis.get_local_rank()]
            divided = DTensor.from_local(part, group.axis, [Shard(0)], run_check=False)
            experts.register_parameter(
                name, nn.Parameter(divided, requires_grad=whole.requires_grad)
            )
        # Numbers of rows are read by the host, which a compiled graph could not.
        forward = partial(compute_experts, experts, group)
        experts.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return found


def place_shards(group: ExpertGroup, parameter: nn.Parameter) -> Shard:
    """Dimension along which FSDP cuts the experts of a rank: the second where it can be halved so.

    A cut of the first one would interleave the shards of the group's ranks.
    """
    assert group.shards is not None  # noqa: S101 - only divided experts are cut
    return Shard(0 if parameter.shape[1] % group.shards.size(-1) else 1)


def compute_experts(
    experts: nn.Module, group: ExpertGroup, hidden: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """Sum of the results of each token's experts, times their weights; collective.

    Args:
        experts: of a layer; its parameters are this rank's experts.
        group: ranks that divide the experts.
        hidden: this rank's tokens. [T, H]
        ids: experts of each. [T, k]
        weights: of these. [T, k]

    Returns:
        [T, H]
    """
    gate_up, down = (local_shard(experts.get_parameter(name)) for name in _STACKS)
    k = ids.shape[1]
    # By expert, so by rank; tokens of an expert stay in their order.
    order = ids.flatten().argsort(stable=True)
    plan = _plan_exchange(ids, group, num_local=len(gate_up))
    rows = _exchange_rows(hidden.to(gate_up.dtype)[order // k], plan.sent, plan.received, group)
    routes = Routes(
        plan.experts[:, None], rows.new_ones(len(rows), 1), torch.zeros_like(plan.experts[:0])
    )
    computed = moe_experts(rows, routes=routes, gate_up=gate_up, down=down)
    returned = _exchange_rows(computed, plan.received, plan.sent, group)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    weighted = returned[place].view(*ids.shape, -1) * weights[:, :, None]
    return weighted.sum(1).to(hidden.dtype)


def _is_divisible(module: nn.Module) -> bool:
    return (
        sorted(name for name, _ in module.named_parameters(recurse=False)) == sorted(_STACKS)
        and getattr(type(module), "_apply_gate", None) is moe._default_apply_gate
        and isinstance(module.act_fn, nn.SiLU | SiLUActivation)
        and bool(module.is_concatenated)
        and not module.is_transposed
    )


def _plan_exchange(ids: Tensor, group: ExpertGroup, *, num_local: int) -> _Exchange:
    if group.is_balanced:
        rows, rest = divmod(ids.numel(), group.size)
        even = [rows + (rank < rest) for rank in range(group.size)]
        return _Exchange(even, even, ids.new_empty(ids.numel()))
    sent = torch.bincount(ids.flatten(), minlength=group.size * num_local)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.process_group)
    by_rank = torch.stack([sent, received]).view(2, group.size, num_local).sum(-1).tolist()
    local = torch.arange(num_local, device=ids.device).repeat(group.size)
    return _Exchange(by_rank[0], by_rank[1], local.repeat_interleave(received))


def _exchange_rows(
    rows: Tensor, sent: list[int], received: list[int], group: ExpertGroup
) -> Tensor:
    """Send consecutive rows to the ranks of a group, and order those received by sender."""
    found: Tensor = _RowExchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return found


class _RowExchange(torch.autograd.Function):
    """All-to-all of unequal parts; gradients go back the same way."""

    @staticmethod
    @override
    def forward(
        ctx: FunctionCtx, rows: Tensor, sent: list[int], received: list[int], group: ExpertGroup
    ) -> Tensor:
        ctx.plan = sent, received, group  # type: ignore[attr-defined]
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    @override
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.plan  # type: ignore[attr-defined]
        return _all_to_all(gradients[0], received, sent, group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: ExpertGroup) -> Tensor:
    found = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group.process_group)
    return found
