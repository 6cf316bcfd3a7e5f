"""The vLLM plugin refuses models that would not compute from what is written into them."""

import copy
import re
import sys
import types
from collections.abc import Callable

import pytest
import torch
from typing_extensions import override
from vllm import _custom_ops
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher

from etude.inference.engine import plugin


class Linear(torch.nn.Module):
    """As vLLM's CPU build leaves a linear layer: a weight, and what computes with it."""

    cpu_linear: Callable[..., torch.Tensor]

    def __init__(self, *, packs: bool, removes: bool = False) -> None:
        super().__init__()
        weight = torch.randn(4, 8)
        self.weight = torch.nn.Parameter(torch.empty(0) if removes else weight)
        if packs:
            packed = weight.clone()
            self.cpu_linear = lambda x, _weight, _bias: torch.nn.functional.linear(x, packed)
        else:
            self.cpu_linear = torch.nn.functional.linear


def load(model: torch.nn.Module, process: Callable[[torch.nn.Module], None]) -> torch.nn.Module:
    """Post-process as the loader does on every device, with this in place of vLLM's part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "_process", process)
        plugin._process_and_compare(model)
    return model


def leave(_: torch.nn.Module) -> None:
    """Most models are not post-processed."""


def test_registering_twice_is_harmless_and_switches_packing_off() -> None:
    plugin.register()
    plugin.register()
    assert plugin.BACKEND in WeightTransferEngineFactory._registry
    assert _custom_ops._supports_onednn is False
    assert utils.check_cpu_sgl_kernel(16, 32, torch.bfloat16) is False


class Proxy:
    """As flask's: whatever is asked of it outside of a request raises."""

    @override
    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(f"no request to read {name} from")


def test_what_other_modules_hold_does_not_stop_the_search_for_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("holds_a_proxy")
    module.request = Proxy()  # type: ignore[attr-defined] # as its author would
    monkeypatch.setitem(sys.modules, module.__name__, module)
    plugin.register()
    dispatcher._rebind_kernels([])


def test_a_model_that_reads_its_parameters_is_taken_and_left_as_it_was() -> None:
    model = torch.nn.Sequential(Linear(packs=False), Linear(packs=False))
    before = copy.deepcopy(model.state_dict())
    plugin.refuse_packed(load(model, leave))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("removes", [True, False])
def test_a_model_that_computes_from_a_packed_copy_is_refused_by_name(removes: bool) -> None:  # noqa: FBT001 - a parameter
    model = torch.nn.Sequential(Linear(packs=False), Linear(packs=True, removes=removes))
    with pytest.raises(RuntimeError, match=r"\['1\.weight'\]"):
        plugin.refuse_packed(load(model, leave))


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("start_weight_update", ()),
        ("update_weights", ({"files": []},)),
        ("receive_weights", (plugin.UpdateInfo(),)),
        ("finish_weight_update", ()),
    ],
)
def test_weights_that_come_past_the_store_are_refused(method: str, args: tuple[object]) -> None:
    model = torch.nn.Sequential(Linear(packs=False))
    before = copy.deepcopy(model.state_dict())
    config = types.SimpleNamespace(parallel_config=None, model_config=None)
    engine = plugin.EtudeWeightEngine(None, config, torch.device("cpu"), load(model, leave))
    with pytest.raises(RuntimeError, match="object store only"):
        getattr(engine, method)(*args)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def reorder(model: torch.nn.Module) -> None:
    weight = model.get_parameter("0.weight")
    weight.data.copy_(weight.data.flip(0))


def replace_by_a_reshuffled_copy(model: torch.nn.Module) -> None:
    weight = model.get_parameter("0.weight")
    model.get_submodule("0").weight = torch.nn.Parameter(weight.detach().flip(0).clone())


def absorb(model: torch.nn.Module) -> None:
    model.get_submodule("0").absorbed = model.get_parameter("0.weight").detach().t().clone()


@pytest.mark.parametrize(
    ("process", "name"),
    [
        (reorder, "0.weight"),
        (replace_by_a_reshuffled_copy, "0.weight"),
        (absorb, "0.absorbed"),
    ],
)
def test_a_model_that_loading_rearranged_is_refused_by_name(
    process: Callable[[torch.nn.Module], None], name: str
) -> None:
    model = load(torch.nn.Sequential(Linear(packs=False), Linear(packs=False)), process)
    with pytest.raises(RuntimeError, match=re.escape(f"['{name}']")):
        plugin.refuse_packed(model)


def test_views_of_parameters_and_tied_parameters_are_no_copies() -> None:
    def tie(model: torch.nn.Module) -> None:
        first, second = model.get_submodule("0"), model.get_submodule("1")
        second.weight = first.weight
        first.transposed = model.get_parameter("0.weight").detach().t()

    model = torch.nn.Sequential(Linear(packs=False), Linear(packs=False))
    with torch.no_grad():
        model.get_parameter("1.weight").copy_(model.get_parameter("0.weight"))
    plugin.refuse_packed(load(model, tie))


def test_a_model_whose_loading_nothing_observed_is_refused() -> None:
    with pytest.raises(RuntimeError, match="past vLLM's base loader"):
        plugin.refuse_packed(torch.nn.Sequential(Linear(packs=False)))


def test_every_device_takes_the_same_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_loader, "process_weights_after_loading", plugin._process)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    plugin.register()
    assert base_loader.process_weights_after_loading is plugin._process_and_compare
