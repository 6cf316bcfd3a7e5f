"""Each rank reads its own shards from the weight files, and the model is transformers' own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.support.stores.counting_store import CountingStore
from torch.distributed.tensor import DTensor, debug
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from etude.common.errors import InvalidFieldError
from etude.trainer.model.fsdp import RankGroup, group_ranks
from etude.trainer.model.mesh import MeshShape
from etude.trainer.model.parameters import local_shard
from etude.trainer.model.policy import InvalidModelError, Policy, copy_frozen, load_policy
from etude.trainer.model.shard_runs import runs_of_shard

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
MOE = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
PLAIN = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = [
    LlamaConfig(**SMALL),
    Qwen3Config(**SMALL, tie_word_embeddings=True),
    Qwen3MoeConfig(**SMALL, **MOE),
    MixtralConfig(**SMALL, num_local_experts=4),
    Gemma2Config(**SMALL),
    Gemma3TextConfig(**SMALL),
    GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    GPTNeoXConfig(**PLAIN, intermediate_size=32, max_position_embeddings=64),
    OPTConfig(**PLAIN, ffn_dim=32, max_position_embeddings=64, word_embed_proj_dim=16),
]


def save(config: PretrainedConfig, folder: Path, **arguments: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=arguments.pop("dtype", torch.float32))
    model.save_pretrained(folder, **arguments)
    return folder


def counting(folder: Path) -> CountingStore:
    return CountingStore({file.name: file.read_bytes() for file in folder.iterdir()})


def header_bytes(folder: Path) -> int:
    """What a look into a file costs: its length twice, and the names."""
    return 16 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")


def by_transformers(folder: Path) -> torch.nn.Module:
    # SDPA has no caps, which Gemma 2 puts on its scores.
    caps = getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager" if caps else "sdpa"
    )
    return model.eval()


@contextmanager
def rank_of(rank: int, *, replicate: int, shard: int, expert: int = 1) -> Iterator[RankGroup]:
    """This process as one rank of a group without peers, for what needs no collective."""
    size = replicate * shard
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield group_ranks(torch.device("cpu"), shape=MeshShape(replicate, expert=expert))
    finally:
        dist.destroy_process_group()
        # What torch remembers of operations on shards names the mesh of this rank.
        debug._clear_sharding_prop_cache()


def assert_shards(policy: Policy, whole: Mapping[str, torch.Tensor]) -> None:
    """This rank's memory holds its elements of the whole tensors."""
    for name, tensor in policy.model.named_parameters():
        assert isinstance(tensor, DTensor)
        flat, runs = whole[name].flatten(), runs_of_shard(tensor)
        expected = [
            flat[start : start + length]
            for start, length in zip(runs.starts.tolist(), runs.lengths.tolist(), strict=True)
        ]
        own = local_shard(tensor.detach()).flatten()
        assert torch.equal(own, torch.cat(expected) if expected else own[:0])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_model_is_the_one_that_transformers_loads(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    save(config, tmp_path, max_shard_size="20KB")
    expected, found = by_transformers(tmp_path), load_policy(tmp_path, seed=0).model
    assert [name for name, _ in found.named_parameters()] == [
        name for name, _ in expected.named_parameters()
    ]
    buffers = dict(found.named_buffers())
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer)
    ids = torch.arange(12)[None]
    assert torch.equal(found(input_ids=ids).logits, expected(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("replicate", "shard", "expert"), [(1, 3, 1), (2, 2, 1), (1, 4, 2), (2, 2, 2), (1, 6, 2)]
)
def test_each_rank_reads_the_bytes_of_its_shards_and_no_others(
    tmp_path: Path, replicate: int, shard: int, expert: int
) -> None:
    # Three ranks cut 16, 32 and 64 rows unevenly; experts are fused when they are loaded. Of six
    # ranks, three cut the two experts of a place: one of them gets none.
    save(Qwen3MoeConfig(**SMALL, **MOE), tmp_path)
    whole = dict(by_transformers(tmp_path).named_parameters())
    for rank in range(replicate * shard):
        store = counting(tmp_path)
        with rank_of(rank, replicate=replicate, shard=shard, expert=expert) as ranks:
            policy = load_policy(tmp_path, seed=0, ranks=ranks, weights=store)
            assert_shards(policy, whole)
            own = sum(local_shard(p.detach()).nbytes for p in policy.parameters())
            assert store.asked_bytes == own + header_bytes(tmp_path)


def test_a_frozen_copy_is_sharded_alike_and_reads_nothing(tmp_path: Path) -> None:
    save(Qwen3Config(**SMALL, tie_word_embeddings=True), tmp_path)
    whole = dict(by_transformers(tmp_path).named_parameters())
    with rank_of(1, replicate=1, shard=3) as ranks:
        policy = load_policy(tmp_path, seed=0, ranks=ranks)
        copy = copy_frozen(policy, ranks)
        assert isinstance(copy, Policy)
        assert_shards(copy, whole)
        assert not any(p.requires_grad for p in copy.parameters())
        with torch.no_grad():
            for parameter in policy.parameters():
                local_shard(parameter).zero_()
        assert_shards(copy, whole)


def test_stored_formats_are_widened(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL), tmp_path, dtype=torch.bfloat16)
    expected = by_transformers(tmp_path)
    for name, tensor in load_policy(tmp_path, seed=0).model.named_parameters():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected.get_parameter(name))


@pytest.mark.parametrize("fault", ["missing", "misshapen", "eight bits"])
def test_a_faulty_tensor_is_refused_by_name_before_anything_is_read(
    tmp_path: Path, fault: str
) -> None:
    file = save(LlamaConfig(**SMALL), tmp_path) / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.down_proj.weight"
    tensor = tensors.pop(name)
    if fault == "misshapen":
        tensors[name] = tensor[:, :-1].contiguous()
    elif fault == "eight bits":
        tensors[name] = tensor.to(torch.float8_e4m3fn)
    save_file(tensors, file)
    store = counting(tmp_path)
    with pytest.raises(InvalidModelError, match=name.replace(".", r"\.")):
        load_policy(tmp_path, seed=0, weights=store)
    assert store.asked_bytes == header_bytes(tmp_path)


def test_a_file_that_the_index_names_and_that_is_lost_is_refused_by_name(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL), tmp_path, max_shard_size="20KB")
    lost = max(tmp_path.glob("model-*.safetensors"))
    lost.unlink()
    with pytest.raises(InvalidModelError, match=lost.name):
        load_policy(tmp_path, seed=0)


@pytest.mark.parametrize(
    ("config", "expert", "found"),
    [
        (LlamaConfig(**SMALL), 2, "llama has no experts to divide; set 1"),
        (Qwen3MoeConfig(**SMALL, **MOE), 3, "4 experts of a layer cannot be divided by 3 ranks"),
        (Qwen3MoeConfig(**SMALL, **MOE, hidden_act="gelu"), 2, "are not stacked SwiGLU layers"),
    ],
    ids=["dense", "odd", "activation"],
)
def test_experts_that_ranks_cannot_divide_are_refused_by_field(
    tmp_path: Path, config: PretrainedConfig, expert: int, found: str
) -> None:
    config.save_pretrained(tmp_path)
    with (
        rank_of(0, replicate=1, shard=expert, expert=expert) as ranks,
        pytest.raises(InvalidFieldError, match=rf"roles\.trainer\.mesh\.expert.*{found}"),
    ):
        load_policy(tmp_path, seed=0, ranks=ranks)
