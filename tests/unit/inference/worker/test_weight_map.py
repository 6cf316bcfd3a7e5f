"""The map is read off a model's own loader, whatever that does with the tensors."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typing_extensions import override

from etude.common.errors import CorruptError
from etude.common.weights.tensors.schema import Schema, TensorSpec, split_of
from etude.inference.worker.coverage import ComputedParameterError, assign_counted, region_rows
from etude.inference.worker.tensors import NAMES, as_words
from etude.inference.worker.weight_map import WeightMap, build_weight_map

HIDDEN, HEADS, VOCABULARY, PADDED, EXPERTS = 6, 4, 5, 8, 3

Named = Iterable[tuple[str, Tensor]]


class Engine(nn.Module):
    """Fuses, pads, stacks and transposes as engines do."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(PADDED, HIDDEN, dtype=dtype))
        self.head = self.embed
        self.qkv = nn.Parameter(torch.zeros(3 * HEADS, HIDDEN, dtype=dtype))
        self.o_proj = nn.Parameter(torch.zeros(HIDDEN, HEADS, dtype=dtype))
        self.w13 = nn.Parameter(torch.zeros(EXPERTS, 2 * HIDDEN, HIDDEN, dtype=dtype))
        self.turned = nn.Parameter(torch.zeros(HEADS, HIDDEN, dtype=dtype).t())
        self.turned_rows = nn.Parameter(torch.zeros(HIDDEN, HEADS, dtype=dtype))
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=torch.float32))

    @torch.no_grad()
    def load_weights(self, tensors: Named) -> None:
        for name, tensor in tensors:
            self._place(name).copy_(tensor.t() if name == "turned_rows" else tensor)
        self.embed[VOCABULARY:] = 0

    def _place(self, name: str) -> Tensor:
        """The part of a parameter that a tensor fills."""
        match name.split("."):
            case ["embed"]:
                return self.embed[:VOCABULARY]
            case ["q" | "k" | "v" as part]:
                return self.qkv.view(3, HEADS, HIDDEN)["qkv".index(part)]
            case ["experts", expert, half]:
                halves = self.w13.view(EXPERTS, 2, HIDDEN, HIDDEN)
                return halves[int(expert), ("gate", "up").index(half)]
            case _:
                return dict(self.named_parameters())[name.partition(".")[0]]


class Half(Engine):
    """The first of two tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Parameter(self.o_proj[:, : HEADS // 2].clone())

    @override
    def load_weights(self, tensors: Named) -> None:
        super().load_weights(
            (name, tensor[:, : HEADS // 2] if name == "o_proj.weight" else tensor)
            for name, tensor in tensors
        )


def schema_of(tensors: dict[str, Tensor]) -> Schema:
    specs = [
        TensorSpec(
            name=name, dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape), split=split_of(name)
        )
        for name, tensor in sorted(tensors.items())
    ]
    return Schema(grid=1, tensors=tuple(specs))


def checkpoint(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    square = dict.fromkeys(
        [f"experts.{e}.{half}" for e in range(EXPERTS) for half in ("gate", "up")],
        (HIDDEN, HIDDEN),
    )
    shapes = {
        **square,
        "embed": (VOCABULARY, HIDDEN),
        **dict.fromkeys("qkv", (HEADS, HIDDEN)),
        "o_proj.weight": (HIDDEN, HEADS),
        "turned": (HIDDEN, HEADS),
        "turned_rows": (HEADS, HIDDEN),
    }
    found = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    return {**found, "norm": torch.randn(HIDDEN)}


def read_through(found: WeightMap, schema: Schema) -> dict[str, list[int]]:
    """The checkpoint, gathered from the parameters element by element."""
    read = {}
    parameters = found.parameters
    for place, spec in enumerate(schema.tensors):
        words: dict[int, int] = {}
        for region in found.regions[place]:
            for row in range(region.rows):
                for column in range(region.width):
                    at = region.source_offset + row * region.source_stride + column
                    live = region.parameter_offset + row * region.parameter_stride + column
                    assert at not in words
                    words[at] = int(parameters[region.parameter][live])
        read[spec.name] = [words[at] for at in range(spec.elements)]
    return read


def oracle(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: as_words(tensor).tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_checkpoint_reads_back_bit_for_bit_through_the_map(dtype: torch.dtype) -> None:
    engine, tensors = Engine(dtype), checkpoint(dtype)
    schema = schema_of(tensors)
    found = build_weight_map(engine, engine.load_weights, schema)
    engine.load_weights(tensors.items())
    assert read_through(found, schema) == oracle(tensors)


def test_regions_are_few() -> None:
    engine, tensors = Engine(), checkpoint()
    schema = schema_of(tensors)
    regions = build_weight_map(engine, engine.load_weights, schema).regions
    count = {spec.name: len(regions[place]) for place, spec in enumerate(schema.tensors)}
    assert (count.pop("turned"), count.pop("turned_rows")) == (HEADS, HIDDEN)
    assert set(count.values()) == {1}


def test_padding_keeps_what_the_loader_gave_it() -> None:
    engine, tensors = Engine(), checkpoint()
    build_weight_map(engine, engine.load_weights, schema_of(tensors))
    assert not engine.embed[VOCABULARY:].any()


def test_a_rank_that_holds_half_of_a_tensor_is_refused_where_none_holds_the_other() -> None:
    engine, tensors = Half(), checkpoint()
    schema = schema_of(tensors)
    found = build_weight_map(engine, engine.load_weights, schema)
    with pytest.raises(
        ComputedParameterError, match=r"take all elements of tensor 'o_proj\.weight'"
    ):
        assign_counted(schema, [region_rows(found.regions)])


def test_a_tensor_that_the_loader_ignores_is_refused_by_name() -> None:
    engine, tensors = Engine(), checkpoint()

    def load(given: Named) -> None:
        engine.load_weights((name, tensor) for name, tensor in given if name != "head")

    tensors["head"] = tensors["embed"]
    schema = schema_of(tensors)
    found = build_weight_map(engine, load, schema)
    with pytest.raises(ComputedParameterError, match="elements of tensor 'head'"):
        assign_counted(schema, [region_rows(found.regions)])


def test_a_tensor_that_the_loader_does_not_know_is_refused() -> None:
    engine, tensors = Engine(), checkpoint()
    tensors["stranger"] = torch.zeros(3)
    with pytest.raises(CorruptError, match=r"do not fit the model.*stranger"):
        build_weight_map(engine, engine.load_weights, schema_of(tensors))


@pytest.mark.parametrize("missing", ["norm", "k", "experts.1.up"])
def test_a_parameter_that_no_tensor_fills_is_refused_by_name(missing: str) -> None:
    engine, tensors = Engine(), checkpoint()
    del tensors[missing]
    parameter = {"norm": "norm", "k": "qkv", "experts.1.up": "w13"}[missing]
    with pytest.raises(CorruptError, match=f"leaves parameter '{parameter}' unfilled"):
        build_weight_map(engine, engine.load_weights, schema_of(tensors))


@pytest.mark.parametrize(
    "computation",
    [lambda x: x * 2, lambda x: -x.exp(), lambda x: x.flip(0) + x, lambda x: x.mean() + 0 * x],
)
def test_a_parameter_that_the_loader_computes_is_refused_by_name(
    computation: Callable[[Tensor], Tensor],
) -> None:
    engine, tensors = Engine(), checkpoint()

    def load(given: Named) -> None:
        engine.load_weights(
            (name, computation(tensor) if name == "norm" else tensor) for name, tensor in given
        )

    schema = schema_of(tensors)
    with pytest.raises(ComputedParameterError, match="'norm'"):
        assign_counted(schema, [region_rows(build_weight_map(engine, load, schema).regions)])


def test_versions_in_another_format_than_the_engines_are_refused() -> None:
    engine, tensors = Engine(torch.bfloat16), checkpoint(torch.float32)
    with pytest.raises(CorruptError, match=r"is BF16.*spec\.weights\.dtype"):
        build_weight_map(engine, engine.load_weights, schema_of(tensors))


@given(st.data())
def test_any_order_of_elements_is_found(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40))
    order = torch.tensor(data.draw(st.permutations(range(size))))
    mixed = nn.Parameter(torch.zeros(size))
    model = nn.Module()
    model.register_parameter("mixed", mixed)

    @torch.no_grad()
    def load(given: Named) -> None:
        for _, tensor in given:
            mixed.copy_(tensor[order])

    tensors = {"w": torch.from_numpy(np.arange(size, dtype=np.float32))}
    schema = schema_of(tensors)
    found = build_weight_map(model, load, schema)
    load(tensors.items())
    assert read_through(found, schema) == oracle(tensors)


class Absorbing(Engine):
    """Holds a part of a projection as a parameter of its own, as latent attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.absorbed = nn.Parameter(self.qkv.detach()[:, :2].t())


def test_a_parameter_that_is_a_part_of_another_is_filled_with_it() -> None:
    engine, tensors = Absorbing(), checkpoint()
    schema = schema_of(tensors)
    found = build_weight_map(engine, engine.load_weights, schema)
    engine.load_weights(tensors.items())
    assert "absorbed" not in found.parameters
    assert read_through(found, schema) == oracle(tensors)
