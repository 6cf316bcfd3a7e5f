"""LoRA: low-rank adapters that alone are trained, while the layers' weights stay merged with them.

A layer's weight W is always base + scale * B A, in fp32: engines, exports and the digest read W and
know of no adapter. The forward pass is W x alone, in the bits that full training would have; the
backward pass gives A and B the gradients that they have in base x + scale * B (A x). After each
update of A and B the change of their product is added to W.

Adapters are complete on every rank: they are small, and each rank can update its shard of W alone.
Source: LoRA: Low-Rank Adaptation of Large Language Models, https://arxiv.org/abs/2106.09685.

Shapes: T tokens, I inputs and O outputs of a layer, R rank of its adapter.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear
from transformers import PreTrainedModel
from typing_extensions import override

from etude.common.api.run.roles import Lora
from etude.common.errors import Problem, UserError
from etude.trainer.model.activation_checkpointing import blocks
from etude.trainer.model.parameters import StepObserver, local_shard
from etude.trainer.model.shard_runs import Interval, intervals_of_shard


class InvalidTargetsError(UserError):
    """A model has not the layers that are to get an adapter."""

    reason = "InvalidSpec"

    def __init__(self, what: str, endings: str) -> None:
        super().__init__(
            Problem(
                reason=self.reason,
                what=what,
                where="roles.trainer.lora.targetModules",
                fix=f"name some of {endings}; or remove roles.trainer.lora to train all weights",
            )
        )


class LoraAdapter(nn.Module):
    """Low-rank change of the weight of one linear layer: scale * B A, in fp32."""

    def __init__(self, layer: nn.Linear, settings: Lora) -> None:
        super().__init__()
        options: Any = {"dtype": torch.float32, "device": layer.weight.device}
        self.lora_A = nn.Parameter(torch.empty(settings.rank, layer.in_features, **options))
        self.lora_B = nn.Parameter(torch.empty(layer.out_features, settings.rank, **options))
        self.scale = settings.scale
        self._earlier: tuple[Tensor, Tensor] | None = None
        # A hook, and no other module: the model keeps its names, and FSDP its own hooks.
        layer.register_forward_hook(self._connect)

    @contextmanager
    def as_earlier(self, earlier: "LoraAdapter") -> Iterator[None]:
        """Context in which passes without gradient give what they gave with an earlier adapter."""
        # A tuple: a module would become a part of this one.
        self._earlier = (earlier.lora_A, earlier.lora_B)
        try:
            yield
        finally:
            self._earlier = None

    def _connect(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            connected: Tensor = _AdapterGradient.apply(  # type: ignore[no-untyped-call]
                output, inputs[0], self.lora_A, self.lora_B, self.scale
            )
            return connected
        if self._earlier is None:
            return output
        now, then = (
            linear(linear(inputs[0].to(output.dtype), a.to(output.dtype)), b.to(output.dtype))
            for a, b in ((self.lora_A, self.lora_B), self._earlier)
        )
        return output - self.scale * (now - then)

    def add_change(self, weight: Tensor, before: tuple[Tensor, Tensor]) -> None:
        """Add scale * (B A - B' A') to this rank's shard of the layer's weight, in place.

        Args:
            weight: [O, I]
            before: A' and B', those that the weight has. [R, I], [O, R]
        """
        rows, columns = intervals_of_shard(weight)
        self.add_to_shard(local_shard(weight.detach()), before, rows=rows, columns=columns)

    @torch.no_grad()
    def add_to_shard(
        self,
        shard: Tensor,
        before: tuple[Tensor, Tensor],
        *,
        rows: Sequence[Interval],
        columns: Sequence[Interval],
    ) -> None:
        """Add the change of these rows and columns to a shard that has them."""
        if not shard.numel():
            return
        old_a, old_b = before
        # The same as B (A - A') + (B - B') A', which no difference of large products rounds.
        left = torch.cat([self.lora_B, self.lora_B - old_b], dim=1)  # [O, 2R]
        right = torch.cat([self.lora_A - old_a, old_a])  # [2R, I]
        left = torch.cat([left[start:end] for start, end in rows])
        right = torch.cat([right[:, start:end] for start, end in columns], dim=1)
        shard.addmm_(left.to(shard.device), right.to(shard.device), alpha=self.scale)


class _AdapterGradient(torch.autograd.Function):
    """A layer's output as it is; its gradient reaches the layer's adapter too."""

    @staticmethod
    @override
    def forward(
        ctx: FunctionCtx,
        output: Tensor,
        inputs: Tensor,
        lora_a: Tensor,
        lora_b: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(inputs, lora_a, lora_b)
        ctx.scale = scale  # type: ignore[attr-defined]
        return output.view_as(output)

    @staticmethod
    @override
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, lora_a, lora_b = ctx.saved_tensors  # type: ignore[attr-defined]
        (gradient,) = gradients
        scaled = gradient.reshape(-1, gradient.shape[-1]) * ctx.scale  # type: ignore[attr-defined]
        taken = inputs.reshape(-1, inputs.shape[-1]).to(scaled.dtype)
        a, b = lora_a.to(scaled.dtype), lora_b.to(scaled.dtype)
        for_a = (scaled @ b).t() @ taken
        for_b = scaled.t() @ (taken @ a.t())
        # The gradient at the inputs goes through the merged weight, which has the adapter in it.
        return gradient, None, for_a.to(lora_a.dtype), for_b.to(lora_b.dtype), None


def create_adapters(model: PreTrainedModel, settings: Lora | None) -> nn.ModuleDict:
    """Create an adapter for each chosen layer of a model, and freeze the model's own parameters.

    Their content is arbitrary until reset_adapters().

    Returns:
        Adapters by the layer's name with slashes for dots; none without settings.

    Raises:
        InvalidTargetsError: a target is no linear layer of the blocks, or there is none by default.
    """
    if settings is None:
        return nn.ModuleDict()
    layers = _find_layers(model, settings)
    model.requires_grad_(requires_grad=False)
    return nn.ModuleDict(
        {name.replace(".", "/"): LoraAdapter(layer, settings) for name, layer in layers.items()}
    )


@torch.no_grad()
def reset_adapters(adapters: nn.ModuleDict, *, seed: int) -> None:
    """Draw A from the Kaiming uniform distribution of a linear layer and set B to zero.

    Source of A's distribution: https://github.com/microsoft/LoRA, as in PEFT.
    """
    generator = torch.Generator().manual_seed(seed)
    for _, adapter in named_adapters(adapters):
        drawn = torch.empty(adapter.lora_A.shape)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        adapter.lora_A.copy_(drawn)
        adapter.lora_B.zero_()


def named_adapters(adapters: nn.Module) -> Iterator[tuple[str, LoraAdapter]]:
    """Adapters with the names of their layers, in the order of the names."""
    for name, adapter in sorted(adapters.named_children()):
        if isinstance(adapter, LoraAdapter):
            yield name.replace("/", "."), adapter


class EarlierPolicy(nn.Module):
    """A policy as it was when this was created, without weights of its own but the adapters."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        # A tuple: the policy's parameters are not this module's.
        self._policy = (policy,)
        self.adapters = copy.deepcopy(policy.get_submodule("adapters")).requires_grad_(
            requires_grad=False
        )

    @override
    @torch.no_grad()
    def forward(self, *arguments: object) -> object:
        """Score tokens as the policy does, by the weights less what adapters learned since."""
        (policy,) = self._policy
        now, then = policy.get_submodule("adapters"), self.adapters
        with ExitStack() as stack:
            for (_, adapter), (_, earlier) in zip(
                named_adapters(now), named_adapters(then), strict=True
            ):
                stack.enter_context(adapter.as_earlier(earlier))
            return policy(*arguments)


@contextmanager
def merge_update(policy: nn.Module, steps: StepObserver | None) -> Iterator[None]:
    """Context around an update of a policy's adapters, whose change is then added to the weights.

    Args:
        policy: with modules model and adapters.
        steps: observer of each weight that changes.
    """
    adapters = dict(named_adapters(policy.get_submodule("adapters")))
    before = {
        layer: (adapter.lora_A.detach().clone(), adapter.lora_B.detach().clone())
        for layer, adapter in adapters.items()
    }
    yield
    for layer, adapter in adapters.items():
        name = f"model.{layer}.weight"
        weight = policy.get_parameter(name)
        is_observed = steps is not None and steps.wants(name)
        with steps.observe_step(name, weight) if steps and is_observed else nullcontext():
            adapter.add_change(weight, before[layer])


def _find_layers(model: PreTrainedModel, settings: Lora) -> dict[str, nn.Linear]:
    """Find the layers that get an adapter, by name.

    Raises:
        InvalidTargetsError: a target is no linear layer of the blocks, or there is none by default.
    """
    inside = {id(module) for block in blocks(model) for module in block.modules()}
    layers = {
        name: module
        for name, module in model.named_modules()
        if id(module) in inside and isinstance(module, nn.Linear)
    }
    endings = ", ".join(sorted({name.rpartition(".")[2] for name in layers})) or "none"
    kind = type(model).__name__
    targets = settings.target_modules
    if targets:
        unknown = [t for t in targets if not any(_ends_with(name, t) for name in layers)]
        if unknown:
            raise InvalidTargetsError(
                f"{kind} has no linear layer {', '.join(unknown)} in its blocks", endings
            )
        return {n: m for n, m in layers.items() if any(_ends_with(n, t) for t in targets)}
    if any(".experts." in name and p.ndim == 3 for name, p in model.named_parameters()):
        raise InvalidTargetsError(
            f"the experts of {kind} are no linear layers, and would stay without an adapter",
            endings,
        )
    if not layers:
        raise InvalidTargetsError(f"{kind} has no linear layers in its blocks", endings)
    return layers


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")
