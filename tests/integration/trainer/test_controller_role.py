"""The trainer's process on Ray, with a real learner: killed and resumed, refused, told apart."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.free_ports import reserve_ports

from etude.cli.weights.verification import verify
from etude.common import weights
from etude.common.blobs import Store, open_store
from etude.common.checkpoints import manifest
from etude.common.rpc import channels
from etude.common.run_folder.record import latest_rows, open_record
from etude.common.weights import GarbageCollector, VersionId
from etude.common.weights.protocol.listing import take_listing
from etude.common.weights.protocol.retention import ORPHAN_S
from etude.trainer.controller.journal.audit import audit_journal
from etude.v1 import run_pb2, run_pb2_grpc

DYING = Path(__file__).with_name("dying")
"""On the path of a process, it kills a Ray worker in the middle of an upload."""

START_S = 240
"""Ray, torch and transformers on two cores that neighbours hold too."""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def world(tmp_path: Path, model_folder: Path) -> Path:
    """A model, some transcripts and some tasks."""
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 263,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    (model_folder / "config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    for number in range(12):
        folder = tmp_path / "tasks" / f"t{number}"
        folder.mkdir(parents=True)
        (folder / "task.toml").write_text("")
        (folder / "instruction.md").write_text("Fix add.")
    return tmp_path


def spec(world: Path, *, mode: str) -> dict[str, Any]:
    optimizer = {"learningRate": "1e-3"}
    task_set = {"name": "train", "uri": f"file://{world}/tasks", "environment": "repos"}
    pool = {"templates": [{"name": "python", "trust": "Trusted"}]}
    rewards = [{"name": "success", "function": "Verifier"}]
    return {
        "model": {"uri": f"file://{world}/model"},
        "storage": {"uri": f"file://{world}/run"},
        "weights": {"dtype": "Float32"},
        "checkpointing": {"everySteps": 2},
        "phases": [
            {
                "name": "sft",
                "type": "SupervisedFineTuning",
                "maxSteps": 3,
                "batchSize": 2,
                "optimizer": optimizer,
                "data": [{"name": "traces", "uri": f"file://{world}/traces.jsonl"}],
            },
            {
                "name": "rl",
                "type": "ReinforcementLearning",
                "maxSteps": 5,
                "optimizer": optimizer,
                "tasks": [task_set],
                "algorithm": {"promptsPerStep": 2, "groupSize": 2},
                "asyncLimits": {
                    "mode": mode,
                    "maxStalenessVersions": 0 if mode == "Sync" else 2,
                },
                "rollout": {"toolset": "Compact", "maxTokens": 512, "timeoutSeconds": 60},
            },
        ],
        "roles": {
            "inference": {},
            "environments": [{"name": "repos", "template": "python", "poolTemplate": pool}],
            "rewards": {"functions": rewards},
        },
    }


@pytest.fixture
def environment(world: Path, partners: Any) -> dict[str, str]:
    ports = reserve_ports(2)
    return {
        **os.environ,
        "ETUDE_RUN_FILE": str(world / "run.json"),
        "ETUDE_SCRATCH": str(world / "scratch"),
        "ETUDE_PORT": str(ports[0]),
        "ETUDE_PROBE_PORT": str(ports[1]),
        "ETUDE_INFERENCE_TARGETS": partners.target,
        "ETUDE_REWARDS_TARGET": partners.target,
        "ETUDE_BROKERS": json.dumps({"repos": partners.target}),
        "ETUDE_TRACES_FILE": str(world / "spans.jsonl"),
    }


UNGUARDED = (
    "from etude.trainer.controller.phases import guards as g; g.MAX_STALE_MISMATCH = 1e9;"
    " g.MAX_MISMATCH = dict.fromkeys(g.MAX_MISMATCH, 1e9); "
)
"""For tests that train on invented log-probs, which the mismatch guard refuses."""


@pytest.fixture
def start(world: Path, environment: dict[str, str]) -> Iterator[Start]:
    """Starts the trainer on a spec; whatever still runs at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def run(
        given: dict[str, Any], *, is_guarded: bool = True, **changed: str
    ) -> subprocess.Popen[bytes]:
        (world / "run.json").write_text(json.dumps({"name": "tiny", "uid": "u", "spec": given}))
        log = (world / "trainer.log").open("ab")
        program = "from etude.trainer.main import main; main()"
        command = [sys.executable, "-c", program if is_guarded else UNGUARDED + program]
        process = subprocess.Popen(command, env={**environment, **changed}, stdout=log, stderr=log)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
async def runs(environment: dict[str, str]) -> AsyncIterator[Any]:
    async with channels.dial(f"127.0.0.1:{environment['ETUDE_PORT']}") as channel:
        yield run_pb2_grpc.RunServiceStub(channel)


async def reports(runs: Any, process: subprocess.Popen[bytes]) -> AsyncIterator[Any]:
    """The reports of a process, from before it listens until it ends.

    Raises:
        AssertionError: it ended.
    """
    async with asyncio.timeout(START_S):
        while process.poll() is None:
            with contextlib.suppress(OSError, grpc.aio.AioRpcError):
                async for report in runs.WatchRun(run_pb2.WatchRunRequest(), timeout=START_S):
                    yield report
            await asyncio.sleep(0.2)
    raise AssertionError(f"the trainer ended with {process.returncode}")


async def status_where(
    runs: Any, process: subprocess.Popen[bytes], holds: Callable[[Any], bool]
) -> Any:
    async for report in reports(runs, process):
        if report.WhichOneof("body") == "status" and holds(report.status):
            return report.status
    raise AssertionError("the reports ended")


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, 60)


async def test_a_killed_trainer_resumes_and_trains_nothing_twice(
    world: Path, start: Start, runs: Any, partners: Any
) -> None:
    given = spec(world, mode="FullyAsync")
    # Twelve of the twenty rollouts, two calls each: enough for a step, too few for all of them.
    partners.engine.holds_after = 24
    first = start(given, is_guarded=False)
    await status_where(runs, first, lambda s: s.phase == "rl" and s.step >= 1)
    first.send_signal(signal.SIGKILL)
    await ended(first)
    partners.engine.holds_after = None

    second = start(given, is_guarded=False)
    done = await status_where(runs, second, lambda s: s.state == run_pb2.RUN_STATE_DONE)
    assert (done.phase, done.step, done.target_step) == ("rl", 5, 5)
    assert done.rollouts.trained == 20
    second.send_signal(signal.SIGTERM)
    assert await ended(second) == 0

    store = open_store(f"file://{world}/run")
    objects = {o.key: store.get(o.key) for o in store.list("journal/")}
    found = audit_journal(objects, max_staleness=2)
    assert found.findings == []
    assert (found.accepted, found.trained) == (20, 20)
    steps = [r for r in latest_rows(open_record(store).rows()) if r["kind"] == "step"]
    assert sorted(r["global_step"] for r in steps) == list(range(1, 9))
    spans = [json.loads(line) for line in (world / "spans.jsonl").read_text().splitlines()]
    assert {"step", "publish"} <= {span["name"] for span in spans}
    written = {o.key.rsplit("/", 1)[1] for o in store.list("checkpoints/000000000008/")}
    assert {"config.json", "controller.json", "manifest.json"} <= written


@pytest.mark.long
async def test_an_engine_that_serves_other_weights_fails_the_run_by_name_and_leaves_its_spans(
    world: Path, start: Start, runs: Any, partners: Any
) -> None:
    partners.rewards.values = (0.0, 1.0)
    process = start(spec(world, mode="Sync"))
    failed = await status_where(runs, process, lambda s: s.state == run_pb2.RUN_STATE_FAILED)
    assert failed.reason == "SamplerMismatch"
    assert "does not serve the published weights" in failed.message
    process.send_signal(signal.SIGTERM)
    assert await ended(process) == 0
    spans = [json.loads(line) for line in (world / "spans.jsonl").read_text().splitlines()]
    groups = {span["span_id"] for span in spans if span["name"] == "group"}
    rollouts = [span for span in spans if span["name"] == "invoke_agent etude"]
    assert rollouts
    assert {span["parent_id"] for span in rollouts} <= groups


def ways(store: Store, folder: Path) -> int:
    """How many ways there are to the accepted versions; each leads to the published bits."""
    verdicts = list(verify(store, folder))
    assert [v for v in verdicts if v.problem] == []
    return len(verdicts)


@pytest.mark.long
async def test_a_rank_that_dies_in_its_upload_leaves_no_version_and_its_run_publishes_again(
    world: Path, start: Start, runs: Any
) -> None:
    given = spec(world, mode="FullyAsync")
    given["roles"]["trainer"] = {"learnerRanks": 2}
    given["phases"][1]["maxSteps"] = 1
    store = open_store(f"file://{world}/run")
    lost = VersionId(1, 1)
    key = f"weights/deltas/{lost.epoch:06d}/{lost.number:012d}/r"
    first = start(given, PYTHONPATH=str(DYING), ETUDE_TEST_DIES_AT=f"{key}0001-")
    assert await asyncio.to_thread(first.wait, START_S) == 1
    assert "learner rank 1 died in upload" in (world / "trainer.log").read_text()

    [torn] = (world / "run").glob(f"{key}0001-*#1")
    assert torn.stat().st_size
    assert weights.accepted_chain(store) == [VersionId(1, 0)]
    [orphan] = [info.key for info in take_listing(store).payloads[lost]]
    assert orphan.startswith(f"{key}0000-")
    assert ways(store, world / "before") == 1

    second = start(given)
    await status_where(runs, second, lambda s: s.state == run_pb2.RUN_STATE_DONE)
    second.send_signal(signal.SIGTERM)
    assert await ended(second) == 0
    chain = weights.accepted_chain(store)
    assert chain[:2] == [VersionId(1, 0), VersionId(2, 1)]
    assert weights.read_epoch(store, 2).parent == VersionId(1, 0)
    assert ways(store, world / "after") >= len(chain)

    collector = GarbageCollector(store=store, epoch=2, resumable=lambda: [VersionId(2, 1)])
    assert collector.collect() == [], "it may be an upload in progress"
    newest = max(file.stat().st_mtime for file in (world / "run" / "weights").rglob("*"))
    os.utime(world / "run" / orphan, (newest - 2 * ORPHAN_S,) * 2)
    assert collector.collect() == [orphan]
    assert ways(store, world / "swept") >= len(chain)


@pytest.mark.long
async def test_weights_that_are_no_numbers_fail_the_run_and_the_last_good_version_is_exported(
    world: Path, start: Start, runs: Any
) -> None:
    given = spec(world, mode="FullyAsync")
    # The first update of Adam is as large as the rate: past what a BF16 can say, not an F32.
    given["phases"][0] |= {"maxSteps": 1, "optimizer": {"learningRate": "3.4e38"}}
    given["weights"] = {"dtype": "BFloat16"}
    process = start(given)
    failed = await status_where(runs, process, lambda s: s.state == run_pb2.RUN_STATE_FAILED)
    assert failed.reason == "NonFiniteWeights"
    assert "weights are NaN or infinite" in failed.message
    assert process.poll() is None, "nobody starts it again"
    process.send_signal(signal.SIGTERM)
    assert await ended(process) == 0

    store = open_store(f"file://{world}/run")
    assert weights.accepted_chain(store) == [VersionId(1, 0)]
    assert take_listing(store).payloads.keys() == {VersionId(1, 0)}
    assert list(manifest.stored_checkpoints(store, run="u")) == []
    exporting = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from etude.cli.main import main; main()", "weights", "export"),
        *(f"file://{world}/run", "newest", str(world / "good"), "--model", str(world / "model")),
        stdout=asyncio.subprocess.PIPE,
    )
    await exporting.communicate()
    assert exporting.returncode == 0
    assert (world / "good" / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ETUDE_RUN_FILE": "/nowhere.json"}, "/nowhere.json"),
        ({"ETUDE_PORT": "http"}, "ETUDE_PORT"),
        ({"ETUDE_INFERENCE_TARGETS": ""}, "ETUDE_INFERENCE_TARGETS"),
        ({"ETUDE_BROKERS": "{}"}, "repos"),
    ],
)
async def test_a_bad_setting_is_named_and_never_tried_again(
    world: Path, start: Start, changed: dict[str, str], words: str
) -> None:
    process = start(spec(world, mode="Sync"), **changed)
    assert await ended(process) == 78
    assert words in (world / "trainer.log").read_text()


# Ray starts for each of these; the last of them, which fails in an actor, is for every change.
@pytest.mark.long
async def test_storage_of_another_run_is_named_and_never_tried_again(
    world: Path, start: Start
) -> None:
    (world / "run").mkdir()
    (world / "run" / "owner").write_text("another")
    process = start(spec(world, mode="Sync"))
    assert await asyncio.to_thread(process.wait, START_S) == 78
    log = (world / "trainer.log").read_text()
    assert "holds run another" in log
    assert "Traceback" not in log


@pytest.mark.long
async def test_a_bad_line_of_data_is_named_and_never_tried_again(world: Path, start: Start) -> None:
    (world / "traces.jsonl").write_text('{"prompt": "hi"}\n')
    process = start(spec(world, mode="Sync"))
    assert await asyncio.to_thread(process.wait, START_S) == 78
    log = (world / "trainer.log").read_text()
    assert "traces.jsonl line 1" in log
    assert "fix:" in log


@pytest.mark.long
async def test_a_model_that_cannot_be_loaded_is_named_and_never_tried_again(
    world: Path, start: Start
) -> None:
    (world / "model" / "pytorch_model.bin").write_bytes(b"pickled")
    process = start(spec(world, mode="Sync"))
    assert await asyncio.to_thread(process.wait, START_S) == 78
    assert "holds pickled weights" in (world / "trainer.log").read_text()
