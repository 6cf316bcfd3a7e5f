"""Two learner ranks publish, two engine replicas serve: the same bits, over nothing but a folder.

All four are processes of their own (FSDP2 over gloo; vLLM on the CPU). The oracles are the model
that the learners export, and a store that counts what it hands out. `pytest -s` shows the sizes.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.support.stores.counting_store import CountingStore

from etude.common import weights
from etude.common.blobs import Store, open_store
from etude.common.rpc.channels import dial
from etude.common.weights import VersionId, WeightManifest
from etude.common.weights.protocol.plan import Edge
from etude.common.weights.replicas.block_selection import select_slice
from etude.common.weights.tensors import digest, safetensors
from etude.common.weights.tensors.schema import Schema, parse_schema
from etude.common.weights.tensors.words import word_type
from etude.inference.updates.staging import Stager
from etude.v1 import inference_pb2, inference_pb2_grpc, weights_pb2, weights_pb2_grpc

LEARNER = Path(__file__).parents[1] / "trainer" / "publishing_rank.py"
RUN_UID = "uid-tiny"
LAST = VersionId(1, 5)
"""What the learners publish: a complete version, then five deltas, the first of them empty."""
DEADLINE_S = 240
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
"""Matrices large enough for tiles of a rank's own; most of the model's elements are in them."""


class Replica(NamedTuple):
    """What one of them answered."""

    status: weights_pb2.WeightStatus
    tokens: Sequence[int]
    logprobs: Sequence[float]
    spans: list[tuple[VersionId, int, int]]
    metrics: str


async def learn(folder: Path) -> None:
    """Run both learner ranks to their end."""
    ranks = [
        await asyncio.create_subprocess_exec(
            sys.executable, str(LEARNER), str(rank), str(folder), "1"
        )
        for rank in range(2)
    ]
    try:
        assert await asyncio.gather(*(rank.wait() for rank in ranks)) == [0, 0]
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()


async def served(role: Any) -> Replica:
    """Have a replica serve the last version, and sample from it."""
    async with dial(f"127.0.0.1:{role.grpc_port}") as channel:
        commit = weights_pb2.CommitVersionRequest(version=LAST.to_proto())
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        answer = await stub.CommitVersion(commit, timeout=DEADLINE_S, wait_for_ready=True)
        request = inference_pb2.GenerateRequest(
            request_id="same",
            prompt_token_ids=[20, 21, 22, 23, 24],
            sampling=inference_pb2.Sampling(max_tokens=24, temperature=0.0),
        )
        generate = inference_pb2_grpc.InferenceServiceStub(channel).Generate
        [said] = [each async for each in generate(request, timeout=DEADLINE_S)]
    metrics = await asyncio.to_thread(role.await_answer, role.probe_port, "/metrics", 200)
    spans = [(VersionId.from_proto(s.sampled), s.start, s.end) for s in said.spans]
    return Replica(answer.status, said.token_ids, said.logprobs, spans, metrics.text)


def assert_serves(replica: Replica, manifest: WeightManifest) -> None:
    """It says so, its live parameters were scanned at every version, and its tokens are of it."""
    assert VersionId.from_proto(replica.status.live) == LAST
    assert replica.status.state_digest.hex() == manifest.state
    assert replica.status.manifest_sha256.hex() == manifest.sha256
    assert 'etude_weights_audit_total{result="sound"}' in replica.metrics
    assert 'result="damaged"' not in replica.metrics
    assert replica.spans == [(LAST, 0, 24)]


def schema_of(store: Store, manifest: WeightManifest) -> Schema:
    data = weights.read_schema_bytes(store, manifest.schema_sha256)
    return parse_schema(data, sha256=manifest.schema_sha256, where="schema")


def exported_state(folder: Path, schema: Schema) -> str:
    """The digest of the model that the learners exported with the last version."""
    data = (folder / f"export-{LAST.number}" / "model.safetensors").read_bytes()
    total = digest.ZERO
    for tensor in safetensors.decode(data, where="export"):
        place = schema.index[tensor.name]
        words = np.frombuffer(bytes(tensor.data), word_type(schema.tensors[place].dtype))
        total = total.plus(digest.scan(words, schema.offsets[place]))
    return total.hex()


def listed(folder: Path) -> str:
    """The objects of the last version, as a user sees them."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from etude.cli.main import main; main()"),
            *("weights", "objects", f"file://{folder}", str(LAST)),
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "160"},
    )
    return done.stdout


def read_by_slice(store: Store, manifest: WeightManifest, folder: Path) -> list[int]:
    """Bytes that a pod with one rank of two asks the store for, to stage a delta.  [2]."""
    schema = schema_of(store, manifest)
    edge = Edge("delta", manifest.base, manifest.ref, schema.sha256, manifest.objects)
    found = []
    for rank in range(2):
        counting = CountingStore({item.key: store.get(item.key) for item in manifest.objects})
        stager = Stager(counting, RUN_UID, folder / f"slice-{rank}")
        stager.stage_blocks(edge, schema, select_slice(schema, rank, 2))
        found.append(counting.asked_bytes)
    return found


@pytest.mark.long
async def test_two_replicas_serve_what_two_learner_ranks_published_and_a_slice_reads_its_share(
    make_model: Callable[..., Path],
    make_role: Callable[..., Any],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    store = open_store(f"file://{folder}")
    weights.claim_epoch(store, holder="test", parent=None, reason="start")
    model = make_model(folder / "model", dtype="bfloat16", **SIZES)
    settings = {"dtype": "BFloat16", "advanced": {"auditEvery": 1}}
    learning = asyncio.create_task(learn(folder), name="learn")
    roles = [
        make_role(tmp_path / pod, model, pod=pod, shared=folder, weights=settings)
        for pod in ("tiny-inference-0", "tiny-inference-1")
    ]
    for role in roles:
        await asyncio.to_thread(role.await_answer, role.probe_port, "/readyz", 200)
    await learning
    one, other = [await served(role) for role in roles]

    chain = [weights.read_manifest(store, version) for version in weights.accepted_chain(store)]
    assert [each.is_complete for each in chain] == [True] + 5 * [False]
    manifest = chain[-1]
    assert manifest.version == LAST
    assert manifest.state == exported_state(folder, schema_of(store, manifest))
    for replica in (one, other):
        assert_serves(replica, manifest)
    assert one.tokens == other.tokens
    assert one.logprobs == other.logprobs

    text = listed(folder)
    assert {item.rank for item in manifest.objects} == {0, 1}
    for item in manifest.objects:
        assert item.key in text
        assert (folder / item.key).stat().st_size == item.size
    slices = read_by_slice(store, manifest, tmp_path)
    lines = [f"slice {rank} of 2 reads {size:,} bytes" for rank, size in enumerate(slices)]
    sys.stdout.write("\n".join(["", text, *lines, f"of {manifest.num_bytes:,} in all", ""]))
    # A little more than half: norms, and matrices too small to be cut into tiles, go to both.
    assert all(0.5 < size / manifest.num_bytes < 0.6 for size in slices)
