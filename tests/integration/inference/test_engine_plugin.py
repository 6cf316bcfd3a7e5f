"""The vLLM plugin refuses models that would not compute from what is written into them."""

import copy
import sys
import types
from collections.abc import Callable

import pytest
import torch
from typing_extensions import override
from vllm import _custom_ops
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils
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
    plugin.refuse_packed(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("removes", [True, False])
def test_a_model_that_computes_from_a_packed_copy_is_refused_by_name(removes: bool) -> None:  # noqa: FBT001 - a parameter
    model = torch.nn.Sequential(Linear(packs=False), Linear(packs=True, removes=removes))
    with pytest.raises(RuntimeError, match=r"\['1\.weight'\]"):
        plugin.refuse_packed(model)


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
    engine = plugin.EtudeWeightEngine(None, config, torch.device("cpu"), model)
    with pytest.raises(RuntimeError, match="object store only"):
        getattr(engine, method)(*args)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_parameter_that_loading_rewrote_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reorders(model: torch.nn.Module) -> None:
        model.get_parameter("0.weight").data.copy_(model.get_parameter("0.weight").data.flip(0))

    monkeypatch.setattr(plugin, "_process", reorders)
    model = torch.nn.Sequential(Linear(packs=False), Linear(packs=False))
    plugin._process_and_compare(model)
    with pytest.raises(RuntimeError, match=r"\['0\.weight'\]"):
        plugin.refuse_packed(model)
