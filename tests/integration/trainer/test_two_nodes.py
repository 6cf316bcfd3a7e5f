"""A trainer on two Ray nodes with nothing in common but an object store: one is lost."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from safetensors.numpy import save
from tests.support import needs
from tests.support.free_ports import reserve_port
from tests.support.stores import s3_servers
from tests.support.trainer.ray_nodes import RayNode

from etude.common.api.kinds import RLRun
from etude.common.blobs import Store, open_store
from etude.common.rpc import channels
from etude.common.run_folder.record import latest_rows, open_record
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape, run_children
from etude.v1 import run_pb2, run_pb2_grpc

START_S = 480
"""Ray, torch and transformers on two cores that neighbours hold too."""

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
PROGRAM = (sys.executable, "-c", "from etude.trainer.main import main; main()")
STEPS = 300
WIDTH, INNER, KEYS, ROWS = 16, 32, 8, 263
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": ROWS,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": KEYS,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens": (ROWS, WIDTH),
    "model.layers.0.self_attn.q_proj": (2 * KEYS, WIDTH),
    "model.layers.0.self_attn.k_proj": (KEYS, WIDTH),
    "model.layers.0.self_attn.v_proj": (KEYS, WIDTH),
    "model.layers.0.self_attn.o_proj": (WIDTH, 2 * KEYS),
    "model.layers.0.self_attn.q_norm": (KEYS,),
    "model.layers.0.self_attn.k_norm": (KEYS,),
    "model.layers.0.mlp.gate_proj": (INNER, WIDTH),
    "model.layers.0.mlp.up_proj": (INNER, WIDTH),
    "model.layers.0.mlp.down_proj": (WIDTH, INNER),
    "model.layers.0.input_layernorm": (WIDTH,),
    "model.layers.0.post_attention_layernorm": (WIDTH,),
    "model.norm": (WIDTH,),
}


class Place(NamedTuple):
    """Prefix in a bucket that holds the model and the data, and nothing on any disk does."""

    uri: str
    endpoint: str

    def store(self, name: str) -> Store:
        return open_store(f"{self.uri}/{name}", endpoint=self.endpoint)


@pytest.fixture
def place(
    request: pytest.FixtureRequest, tmp_path: Path, model_folder: Path, s3_credentials: None
) -> Place:
    kind = "minio" if s3_servers.minio_binary().exists() else "moto"
    endpoint: str = request.getfixturevalue(f"{kind}_endpoint")
    place = Place(f"s3://{s3_servers.BUCKET}/{tmp_path.name}", endpoint)
    rng = np.random.default_rng(0)
    weights = {
        f"{name}.weight": 0.1 * rng.standard_normal(shape, np.float32) + ("norm" in name)
        for name, shape in SHAPES.items()
    }
    model = place.store("model")
    model.put("model.safetensors", save(weights))
    model.put("config.json", json.dumps(CONFIG).encode())
    for file in model_folder.iterdir():
        model.put(file.name, file.read_bytes())
    turns = [["hi", "ok"], ["one", "two"], ["add", "done"], ["fix it", "fixed"]]
    lines = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in turns
    ]
    place.store("data").put("traces.jsonl", "\n".join(map(json.dumps, lines)).encode())
    return place


def spec(place: Place, run: str, *, gpus: int) -> dict[str, Any]:
    def phase(name: str, kind: str, steps: int, rate: str) -> dict[str, Any]:
        return {
            "name": name,
            "type": kind,
            "maxSteps": steps,
            "batchSize": 3,
            "optimizer": {"learningRate": rate},
            "data": [{"name": "traces", "uri": f"{place.uri}/data/traces.jsonl"}],
        }

    return {
        "model": {"uri": f"{place.uri}/model"},
        "storage": {"uri": f"{place.uri}/{run}", "endpoint": place.endpoint},
        "checkpointing": {"everySteps": 50},
        "phases": [
            phase("first", "SupervisedFineTuning", 5, "1e-3"),
            phase("second", "SupervisedFineTuning", STEPS, "1e-4"),
        ],
        "roles": {"trainer": {"learnerRanks": 2, "gpusPerReplica": gpus}},
        "scheduling": {"workload": "RayCluster"},
    }


def ray_commands(given: dict[str, Any], gcs: str) -> tuple[str, str]:
    """How the operator starts Ray on the head and on a worker, but for the address of the head."""
    platform = Platform(images={"trainer": "trainer"}, integrations=frozenset({"kuberay"}))
    run = RLRun.model_validate({"metadata": {"name": "tiny", "uid": "u"}, "spec": given})
    children = run_children(run, RunShape(images=platform.images), platform)
    (cluster,) = (each["spec"] for each in children if each["kind"] == "RayCluster")
    groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    words = [group["template"]["spec"]["containers"][0]["command"][-1] for group in groups]
    head, worker = (each.partition(" && ")[0].removeprefix("exec ") for each in words)
    # In a container it is the main process; here it shall return.
    worker = worker.removesuffix(" --block")
    return f"{head} --port={gcs.partition(':')[2]}", f"{worker} --address={gcs}"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[RayNode]]:
    if os.geteuid() != 0:
        needs.skip("mount namespaces need root")
    env = {**s3_servers.CREDENTIALS, "GLOO_SOCKET_IFNAME": "lo", "RAY_worker_niceness": "0"}
    made = [RayNode(tmp_path / f"node-{each}", each, env) for each in (HEAD, OTHER)]
    yield made
    for node in made:
        node.close()


class Trainer(NamedTuple):
    """A controller's process and the port of its reports."""

    process: subprocess.Popen[bytes]
    port: int

    async def reports(self) -> AsyncIterator[run_pb2.RunStatus]:
        """Statuses until the process ends."""
        async with channels.dial(f"127.0.0.1:{self.port}") as channel:
            runs = run_pb2_grpc.RunServiceStub(channel)
            while self.process.poll() is None:
                with contextlib.suppress(OSError, grpc.aio.AioRpcError):
                    async for report in runs.WatchRun(run_pb2.WatchRunRequest(), timeout=START_S):
                        if report.WhichOneof("body") == "status":
                            yield report.status
                await asyncio.sleep(0.1)

    async def until(self, holds: Callable[[run_pb2.RunStatus], bool]) -> run_pb2.RunStatus:
        async with asyncio.timeout(START_S):
            async for status in self.reports():
                if holds(status):
                    return status
        raise AssertionError(f"the trainer ended with {self.process.returncode}")


def settings(run_file: str, scratch: str, **env: str) -> dict[str, str]:
    fixed = {"ETUDE_RUN_FILE": run_file, "ETUDE_SCRATCH": scratch}
    return {
        **fixed,
        "ETUDE_PORT": str(reserve_port()),
        "ETUDE_PROBE_PORT": str(reserve_port()),
        **env,
    }


def start_on(node: RayNode, given: dict[str, Any], gcs: str) -> Trainer:
    run = {"name": "tiny", "uid": "u", "spec": given}
    (node.folder / "run.json").write_text(json.dumps(run))
    env = settings("/tmp/run.json", "/tmp/scratch", RAY_ADDRESS=gcs)
    return Trainer(node.run(PROGRAM, log="trainer.log", **env), int(env["ETUDE_PORT"]))


@contextlib.contextmanager
def start_here(folder: Path, given: dict[str, Any]) -> Iterator[Trainer]:
    """A trainer on a Ray of this machine alone."""
    (folder / "run.json").write_text(json.dumps({"name": "tiny", "uid": "v", "spec": given}))
    env = settings(str(folder / "run.json"), str(folder / "scratch"))
    with (folder / "trainer.log").open("ab") as log:
        process = subprocess.Popen(PROGRAM, env={**os.environ, **env}, stdout=log, stderr=log)
    try:
        yield Trainer(process, int(env["ETUDE_PORT"]))
    finally:
        process.terminate()
        process.wait(START_S)


def wait_for_words(words: str, log: Path) -> None:
    """Wait until a log has these words.

    Raises:
        TimeoutError: it has not.
    """
    deadline_s = time.monotonic() + START_S
    while words not in log.read_text():
        if time.monotonic() > deadline_s:
            raise TimeoutError(log.read_text()[-2000:])
        time.sleep(0.2)


def steps_of(store: Store) -> dict[int, tuple[float, str]]:
    """Loss and digest of the weights after each step."""
    return {
        row["global_step"]: (row["loss"], row["weight_digest"])
        for row in latest_rows(open_record(store).rows())
        if row["kind"] == "step"
    }


@pytest.mark.long
@pytest.mark.timeout(3 * START_S)
async def test_a_run_that_loses_a_node_goes_on_from_its_checkpoint_as_if_it_had_not(
    place: Place, nodes: list[RayNode], tmp_path: Path
) -> None:
    head, other = nodes
    gcs = f"{HEAD}:{reserve_port()}"
    given = spec(place, "run", gpus=1)
    start_head, start_other = ray_commands(given, gcs)
    head.start_ray(start_head)
    other.start_ray(start_other)

    first = start_on(head, given, gcs)
    await first.until(lambda s: s.phase == "second" and s.step >= 60)
    other.kill_raylet()
    lost = await first.until(lambda s: s.reason != "")
    assert lost.reason == "LearnerLost", lost.message
    assert await asyncio.to_thread(first.process.wait, START_S) == 1, "a fault of the platform"

    second = start_on(head, given, gcs)
    log = head.folder / "trainer.log"
    await asyncio.to_thread(wait_for_words, "learner ranks wait for nodes", log)
    await asyncio.to_thread(other.start_ray, start_other)
    done = await second.until(lambda s: s.state == run_pb2.RUN_STATE_DONE)
    assert (done.phase, done.step) == ("second", STEPS)
    second.process.terminate()
    assert await asyncio.to_thread(second.process.wait, START_S) == 0

    # Each node has fetched a tokenizer for itself; the weights are on neither disk.
    assert list(other.folder.rglob("tokenizer.json"))
    assert not [*head.folder.rglob("*.safetensors"), *other.folder.rglob("*.safetensors")]
    with start_here(tmp_path, spec(place, "undisturbed", gpus=0)) as alone:
        await alone.until(lambda s: s.state == run_pb2.RUN_STATE_DONE)
    found = steps_of(place.store("run"))
    assert sorted(found) == list(range(1, STEPS + 6))
    assert found == steps_of(place.store("undisturbed"))
