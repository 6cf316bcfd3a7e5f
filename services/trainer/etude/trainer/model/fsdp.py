"""FSDP2: learner ranks that share one set of weights, and their collectives."""

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from etude.trainer.model.compute_device import is_gpu
from etude.trainer.model.context_parallel import UNDIVIDED, ContextGroup
from etude.trainer.model.experts.expert_parallel import (
    ALL_EXPERTS,
    ExpertGroup,
    divide_experts,
    place_shards,
)
from etude.trainer.model.mesh import (
    ONE_COPY,
    MeshShape,
    build_context_group,
    build_expert_group,
    build_mesh,
    sharding_mesh,
)

_TIMEOUT = datetime.timedelta(minutes=10)
"""A rank that is silent for longer has died: its peers stop instead of waiting for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """This rank among all ranks; every method is collective, and cheap for a single rank."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """Axes over which weights are spread; None for a single rank."""
    context: ContextGroup = UNDIVIDED
    """Ranks that share the tokens of this rank's rows."""
    experts: ExpertGroup = ALL_EXPERTS
    """Ranks that divide the experts of each layer."""
    offload: bool = False
    """True if weights, gradients and moments are in the host's memory; several ranks only."""

    @property
    def weight_device(self) -> torch.device:
        """Device of this rank's shards."""
        return torch.device("cpu") if self.offload else self.device

    @property
    def is_first(self) -> bool:
        """True on the rank that does what only one rank may do."""
        return self.rank == 0

    @property
    def num_shares(self) -> int:
        """Shares of a batch: ranks of a context group work on the same one."""
        return self.size // self.context.size

    @property
    def share(self) -> int:
        """Index of this rank's share."""
        return self.rank // self.context.size

    def shard(self, policy: nn.Module) -> None:
        """Shard the parameters of a policy over the mesh, block by block (FSDP2).

        Parameters without memory stay so. Adapters are not sharded.

        Raises:
            InvalidFieldError: the experts of the policy cannot be divided as they are to be.
        """
        if self.mesh is None:
            return
        complete = set(policy.get_submodule("adapters").parameters())
        model = policy.get_submodule("model")
        names = set(getattr(model, "_no_split_modules", None) or ())
        blocks = [module for module in policy.modules() if type(module).__name__ in names]
        # Pinned memory is copied while the device computes.
        pinned = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        formats = mixed_precision(self.device)
        cut = partial(
            fully_shard,
            ignored_params=complete,
            offload_policy=pinned if self.offload else OffloadPolicy(),
        )
        for module in divide_experts(model, self.experts):
            cut(
                module,
                mesh=self.experts.shards,
                # Weights of choices stay as the router computed them.
                mp_policy=replace(formats, cast_forward_inputs=False),
                shard_placement_fn=partial(place_shards, self.experts),
            )
        for module in (*blocks, policy):
            cut(module, mesh=sharding_mesh(self.mesh), mp_policy=formats)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                # Losses are weighted with totals of the whole batch: ranks add, never average.
                module.set_gradient_divide_factor(1.0)
                # Else a factor of 1 becomes a multiplication in the collective, which gloo lacks.
                module.set_force_sum_reduction_for_comms(True)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of parameters that every rank has complete, in one message."""
        given = list(parameters)
        if self.size == 1 or not given:
            return
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in given]
        total = torch.cat([gradient.reshape(-1) for gradient in own])
        dist.all_reduce(total)
        parts = torch.split(total, [p.numel() for p in given])
        for parameter, part in zip(given, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def total(self, values: Tensor) -> Tensor:
        """Sum over all ranks, elementwise."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """Maximum over all ranks, elementwise."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def gather_rows(self, values: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks along their first axis, on the CPU."""
        if self.size == 1:
            return values.cpu()
        parts: list[Tensor] = [values] * self.size
        dist.all_gather_object(parts, values.cpu())
        return torch.cat(parts)

    def _all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size > 1:
            values = values.to(self.device, copy=True)
            dist.all_reduce(values, operation)
        return values.cpu()


def reshard_parameters(module: nn.Module) -> None:
    """Free gathered parameters, so that named_parameters() gives this rank's fp32 shards again.

    FSDP2 keeps the root's parameters gathered after a forward pass until a backward pass, which a
    pass without gradient does not have.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def mixed_precision(device: torch.device) -> MixedPrecisionPolicy:
    """Number formats of a sharded step: parameters are fp32, gathered and used in bf16 on GPUs.

    Gradients are added over ranks in fp32.
    """
    if not is_gpu(device):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Rendezvous(NamedTuple):
    """Address at which ranks meet, open in the process of rank 0."""

    url: str
    store: TCPStore
    """Server at this address, and a client of it."""


def open_rendezvous(host: str) -> Rendezvous:
    """Open an address at which ranks meet, on a port that is free, and stays taken.

    Only the process of rank 0 may: there, joining ranks at this address shares the server.

    Args:
        host: address of this host that all ranks can reach, IPv4 or IPv6.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    name = f"[{host}]" if ":" in host else host
    return Rendezvous(f"tcp://{name}:{store.port}", store)


def join_ranks(
    *,
    rank: int,
    size: int,
    rendezvous: str,
    shape: MeshShape = ONE_COPY,
    offload: bool = False,
) -> RankGroup:
    """Join the process group; a single rank needs none.

    Args:
        rank: of this process.
        size: number of ranks.
        rendezvous: where they meet.
        shape: of their mesh.
        offload: keep weights, gradients and moments in the host's memory; a single rank does not.

    Raises:
        ValueError: several ranks have no address to meet at.
    """
    if size > 1 and not rendezvous:
        raise ValueError(f"{size} ranks need a rendezvous")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if size == 1:
        return RankGroup(rank=rank, size=size, device=device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if offload and device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"  # the norm of gradients is added up where they are
    dist.init_process_group(
        backend, init_method=rendezvous, rank=rank, world_size=size, timeout=_TIMEOUT
    )
    return replace(group_ranks(device, shape=shape), offload=offload)


def group_ranks(device: torch.device, *, shape: MeshShape, is_balanced: bool = False) -> RankGroup:
    """Group all ranks of the process group by the axes of their mesh; collective.

    Args:
        device: of this rank.
        shape: of the mesh.
        is_balanced: each rank is taken to get an equal number of tokens for its experts.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    return RankGroup(
        rank=rank,
        size=size,
        device=device,
        mesh=build_mesh(device.type, replicate=shape.replicate, shard=size // shape.replicate),
        context=build_context_group(device.type, size=shape.context),
        experts=build_expert_group(device.type, size=size, shape=shape, is_balanced=is_balanced),
    )


def leave_ranks(ranks: RankGroup) -> None:
    """Leave the process group, so that this process can end; collective."""
    if ranks.size > 1:
        # A thread of the group drops the tensors of a collective that is over, for which it needs
        # the interpreter; one that asks for it while it ends aborts the process. Waiting here
        # leaves the interpreter to these threads until they have nothing left to drop.
        dist.barrier()
        dist.destroy_process_group()
