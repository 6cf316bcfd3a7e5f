"""A learner, the controller's half of publishing, and a reader of the store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from etude.common import weights
from etude.common.api.run.roles import Lora
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.blobs import Store, open_store
from etude.common.weights import VersionId
from etude.common.weights.protocol import publication
from etude.common.weights.protocol.manifest import VersionRef, WeightManifest
from etude.common.weights.protocol.plan import plan_path
from etude.common.weights.replicas import block_reader, staged_file
from etude.common.weights.replicas.live_weights import LiveWeights, identity_regions
from etude.common.weights.tensors.schema import parse_schema
from etude.common.weights.tensors.words import Words, word_type
from etude.trainer.export import hf_folder
from etude.trainer.export.receipts import PublishBase, RankReceipt, build_manifest
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"

Build = Callable[..., Learner]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = open_store(f"file://{tmp_path}/run")
    weights.claim_epoch(found, holder="test", parent=None, reason="start")
    return found


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def make(
        *,
        dtype: str = "BFloat16",
        model: Path = MODEL,
        lora: Lora | None = None,
        **settings: Any,
    ) -> Learner:
        torch.set_num_threads(1)
        return Learner(
            LearnerConfig(
                run="uid",
                holder="test",
                model_folder=model,
                storage=Storage(uri=f"file://{tmp_path}/run"),
                weights=Weights.model_validate({"dtype": dtype, **settings}),
                lora=lora,
                base_uri="hf://Lab/Tiny@v1",
            )
        )

    return make


class Chain:
    """The controller's half: manifests, each on the last one."""

    def __init__(self, store: Store, epoch: int = 1) -> None:
        self.store = store
        self.epoch = epoch
        self.number = 0
        self.base: PublishBase | None = None

    def publish(self, learner: Learner) -> WeightManifest:
        receipt = self.upload(learner)
        assert len(receipt.model_dump_json()) <= 1024
        return self.commit(receipt)

    def upload(self, learner: Learner) -> RankReceipt:
        version = VersionId(self.epoch, self.number)
        receipt = learner.encode(version, self.base)
        learner.upload(version)
        return receipt

    def commit(self, receipt: RankReceipt) -> WeightManifest:
        manifest = build_manifest(
            [receipt],
            run="uid",
            version=VersionId(self.epoch, self.number),
            step=self.number,
            holder="test",
            base=self.base.ref if self.base else None,
        )
        publication.publish_manifest(self.store, manifest)
        self.base = PublishBase(manifest.ref, manifest.schema_sha256)
        self.number += 1
        return manifest


class Reader:
    """A replica that holds the checkpoint's tensors as they are."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.live: VersionRef | None = None
        self.tensor_words: dict[str, Words] = {}
        self.kinds: list[str] = []

    def follow(self, manifest: WeightManifest) -> None:
        data = publication.read_schema_bytes(self.store, manifest.schema_sha256)
        schema = parse_schema(data, sha256=manifest.schema_sha256, where="schema")
        if not self.tensor_words:
            self.tensor_words = {
                spec.name: np.zeros(spec.elements, word_type(spec.dtype)) for spec in schema.tensors
            }
        memory = LiveWeights(schema, self.tensor_words, identity_regions(schema))
        for edge in plan_path(self.store, self.live, manifest.version):
            self.kinds.append(edge.kind)
            block_reader.stage(self.store, edge, schema, self.folder / "staged")
            prepared = memory.prepare(staged_file.read_staged(self.folder / "staged"))
            assert memory.write(prepared)
            assert memory.scan().hex() == edge.target.state
            self.live = edge.target

    def assert_equal(self, learner: Learner) -> None:
        """Its words are those that an export of the learner has."""
        dtype = learner._config.weights.dtype
        sources = hf_folder.gather_sources(learner.policy)
        expected = [*hf_folder.convert_tensors(learner.policy, sources, dtype=dtype).tensors]
        assert self.tensor_words.keys() == {tensor.name for tensor in expected}
        for tensor in expected:
            assert self.tensor_words[tensor.name].tobytes() == bytes(tensor.data)


@pytest.fixture
def chain(store: Store) -> Chain:
    return Chain(store)


@pytest.fixture
def reader(store: Store, tmp_path: Path) -> Reader:
    return Reader(store, tmp_path)


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """A mixture of experts, which is fused when it is loaded."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    return tmp_path / "moe"
