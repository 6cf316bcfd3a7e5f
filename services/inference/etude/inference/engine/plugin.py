"""vLLM plugin: keeps parameters writable in place, so that versions can be swapped in.

On CPU vLLM packs linear layers and experts at load and computes from what it packed, so that
writing into a parameter would silently change nothing, or other numbers than the ones meant;
`register` switches that off. On every device kernels
may reorder or copy weights after they were loaded: exact bytes would then be the wrong function.
An engine whose loading changed a parameter, or derived a matrix from one, is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils
from blake3 import blake3
from typing_extensions import override
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.v1.engine.core import EngineCore
from vllm.v1.sample import rejection_sampler

from etude.inference.engine.head_rotation import rotate_every_head
from etude.inference.engine.live_experts import prefer_live_experts
from etude.inference.worker.drafted_model import CHANGED

BACKEND = "etude"

NO_UPDATES = (
    "this engine takes policy versions from its run's object store only: weights written past its "
    "updater would be in no digest and under no version"
)

SET_SPECULATION = "etude_set_speculation"
"""Method of vLLM's engine core, which may be in a process of its own."""

_process = base_loader.process_weights_after_loading


def register() -> None:
    """Register with vLLM, which calls this in each process before it builds a model; repeatable."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "EtudeWeightEngine")
    # vLLM looks for its kernels in every attribute of every module: two builtins' names, new to it.
    setattr(dispatcher, "hasattr", _has_attribute)  # noqa: B010 - mypy knows no such attribute
    setattr(dispatcher, "vars", _attributes)  # noqa: B010 - as above
    if current_platform.is_cpu():
        vllm._custom_ops._supports_onednn = False
        vllm.model_executor.layers.utils.check_cpu_sgl_kernel = _decline_sgl_kernel
        rejection_sampler.expand_batch_to_tokens = expand_to_tokens
        prefer_live_experts()
        rotate_every_head()
    base_loader.process_weights_after_loading = _process_and_compare
    setattr(EngineCore, SET_SPECULATION, _set_speculation)


def _has_attribute(value: object, name: str) -> bool:
    """Test for an attribute of any module's object; lazy proxies may raise any error."""
    try:
        return hasattr(value, name)
    except Exception:  # noqa: BLE001 - flask's raise RuntimeError outside of a request
        return False


def _attributes(value: object) -> Mapping[str, object]:
    """Attributes of any object in any module, for vLLM's search for its kernels.

    It uses vars(), which returns no mapping for numba's handle of LLVM.
    """
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, Mapping) else {}


def _decline_sgl_kernel(*_: object) -> bool:
    """Decline: processors with AMX tiles pack small bfloat16 linears otherwise."""
    return False


def _set_speculation(core: EngineCore, tokens: int) -> None:
    """Set the number of guessed tokens between two forward passes; 0 for none.

    The table is vLLM's own: guessed tokens by the number of running requests.
    """
    table = core.scheduler.dynamic_sd_lookup
    if table is not None:
        table[:] = [tokens] * len(table)


def expand_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat the value of each request for its guessed tokens.

    On CPUs vLLM 0.32 writes the values into a copy cast to integers, and returns memory without
    any: temperatures of guessed tokens were arbitrary.

    Args:
        x: value of each request, such as its temperature.
        cu_num_tokens: guessed tokens of the requests up to and with each.
        num_tokens: of all requests.
        replace_from: a value that is replaced.
        replace_to: what by.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)


def _process_and_compare(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
    """Post-process as vLLM does; record on the model the parameters that this changed."""
    before, known = _fingerprints(model), _derived_matrices(model)
    _process(model, *args, **kwargs)
    after = _fingerprints(model)
    changed = [name for name in before if before[name] != after.get(name)]
    setattr(model, CHANGED, changed + sorted(_derived_matrices(model) - known))


def _fingerprints(model: torch.nn.Module) -> dict[str, bytes]:
    """Digest of each parameter's bits and shape, on any device; tied parameters by each name.

    Parameters go through host memory one by one: some ten seconds for 15 GB, once per start.
    """
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        data = parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        found[name] = blake3(data).digest() + repr(tuple(parameter.shape)).encode()
    return found


def _derived_matrices(model: torch.nn.Module) -> set[str]:
    """Names of matrices of modules that are no parameters, buffers or views of these.

    A model that computes from one, such as the absorbed projections of latent attention, would
    not see what is written into the parameter behind it.
    """
    tensors = [*model.parameters(), *model.buffers()]
    shared = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return {
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.ndim >= 2
        and value.numel()
        and value.untyped_storage().data_ptr() not in shared
    }


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # mypy does not follow vLLM
    """Empty: versions come from the object store."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # mypy does not follow vLLM
    """Empty: no version is sent this way."""


class EtudeWeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]  # as above
    """Refuses models that versions cannot be written into, and writers other than the updater."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        super().__init__(*args, **kwargs)
        refuse_packed(self.model)

    @override
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        return None

    def _refuse(self, *_: object) -> None:
        """Refuse an update of weights.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(NO_UPDATES)

    start_weight_update = update_weights = receive_weights = finish_weight_update = _refuse

    @override
    def shutdown(self) -> None:
        return None


@torch.no_grad()
def refuse_packed(model: torch.nn.Module) -> None:
    """Refuse a model that does not compute from the parameters that versions are written to.

    Raises:
        RuntimeError: naming them; or its loading was not observed.
    """
    if not hasattr(model, CHANGED):
        raise RuntimeError(
            "the model was loaded past vLLM's base loader, so that nothing proves that it computes "
            "from its parameters: load it by the format dummy, auto or safetensors"
        )
    packed = [name for name, parameter in model.named_parameters() if parameter.numel() == 0]
    packed += getattr(model, CHANGED)
    packed += [f"{name}.weight" for name, layer in model.named_modules() if _ignores_weight(layer)]
    if packed:
        raise RuntimeError(
            f"the model does not compute from its parameters {packed[:4]}, but from a copy in "
            "another layout: new policy versions written into them would change nothing, so this "
            "model cannot be served from versions on this machine"
        )


def _ignores_weight(layer: torch.nn.Module) -> bool:
    """True if a linear layer of vLLM's CPU build gives the same result after its weight changed."""
    compute = getattr(layer, "cpu_linear", None)
    weight = getattr(layer, "weight", None)
    if not callable(compute) or not isinstance(weight, torch.Tensor) or weight.numel() == 0:
        return False
    probe = torch.ones(1, weight.shape[1], dtype=weight.dtype)
    row = weight[0].clone()
    before = compute(probe, weight, None)[0, 0].clone()
    weight[0] += 1
    after = compute(probe, weight, None)[0, 0].clone()
    weight[0] = row
    return bool(before == after)
