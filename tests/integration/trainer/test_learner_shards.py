"""Two ranks publish a shard each; what a reader puts together is what the model exports."""

import asyncio
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from etude.common import weights
from etude.common.blobs import open_store
from etude.common.weights import VersionId
from etude.common.weights.protocol import publication
from etude.common.weights.protocol.manifest import VersionRef, read_manifest
from etude.common.weights.protocol.plan import plan_path
from etude.common.weights.replicas import block_reader, staged_file
from etude.common.weights.replicas.live_weights import LiveWeights, identity_regions
from etude.common.weights.tensors import safetensors
from etude.common.weights.tensors.schema import parse_schema
from etude.common.weights.tensors.words import word_type

PROGRAM = Path(__file__).with_name("publishing_rank.py")


async def run(folder: Path, *, expert: int) -> None:
    start = partial(asyncio.create_subprocess_exec, sys.executable, str(PROGRAM))
    ranks = [await start(str(rank), str(folder), str(expert)) for rank in range(2)]
    try:
        codes = await asyncio.gather(*(rank.wait() for rank in ranks))
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
    assert codes == [0, 0]


def model(folder: Path, *, experts: int) -> None:
    """A mixture of experts; two ranks cannot share its rows evenly, nor three experts."""
    config = Qwen3MoeConfig(
        vocab_size=65,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("experts", "expert"), [(3, 1), (4, 2)], ids=["sharded", "divided experts"]
)
async def test_the_shards_of_two_ranks_add_up_to_the_exported_model_at_every_version(
    tmp_path: Path, experts: int, expert: int
) -> None:
    store = open_store(f"file://{tmp_path}")
    weights.claim_epoch(store, holder="test", parent=None, reason="start")
    model(tmp_path / "model", experts=experts)
    await run(tmp_path, expert=expert)
    first = read_manifest(store, VersionId(1, 0))
    data = publication.read_schema_bytes(store, first.schema_sha256)
    schema = parse_schema(data, sha256=first.schema_sha256, where="schema")
    words = {spec.name: np.zeros(spec.elements, word_type(spec.dtype)) for spec in schema.tensors}
    memory = LiveWeights(schema, words, identity_regions(schema))
    live: VersionRef | None = None
    chain = weights.accepted_chain(store)
    for version in chain:
        for edge in plan_path(store, live, version):
            block_reader.stage(store, edge, schema, tmp_path / "staged")
            assert memory.write(memory.prepare(staged_file.read_staged(tmp_path / "staged")))
            live = edge.target
        assert live is not None
        assert memory.scan().hex() == live.state
        file = (tmp_path / f"export-{version.number}" / "model.safetensors").read_bytes()
        exported = {tensor.name: tensor for tensor in safetensors.decode(file, where="export")}
        assert exported.keys() == words.keys()
        for name, tensor in exported.items():
            assert bytes(tensor.data) == words[name].tobytes(), f"{version}: {name}"
    manifests = [read_manifest(store, version) for version in chain]
    assert [manifest.is_complete for manifest in manifests] == [True] + 5 * [False]
    assert {len(manifest.objects) for manifest in manifests[2:]} == {2}
