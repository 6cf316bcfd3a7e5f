"""The real engine along a chain of changes: every swap exact, none half-way.

Tests run in order on one engine in this process: a start costs ten seconds. The oracles are
transformers on the published words, and a fresh engine on an exported folder.
"""

import asyncio
import json
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import safetensors.torch
import torch
import yaml
from tests.support.weights.followed_engine import PROMPT, TOLERANCE, Bench, Oracle, learn
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import UnavailableError
from etude.common.probes import Probes
from etude.common.role_inputs import ResolvedRun
from etude.common.weights import VersionId
from etude.inference.engine import replica as replicas
from etude.inference.engine.interface import Finish, SampleRequest, TokenChunk
from etude.inference.engine.prefix_cache import PrefixCacheSalts
from etude.inference.settings import EngineOptions, PrefixCache, Settings
from etude.inference.status import ReplicaStatus
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager
from etude.inference.wiring import InferenceRole
from etude.inference.worker.rank import Rank

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[3]
RUN = "uid-run"
MAX_GROWTH_KIB = 24 << 10
"""Of the process over a hundred swaps; one copy of anything per swap would be far more."""

FRESH = """
import asyncio, json, os, sys
from pathlib import Path
from etude.inference.engine.interface import SampleRequest
from etude.inference.settings import EngineOptions
options = EngineOptions(model=Path(sys.argv[1]), served_name="tiny", dtype="float32",
    max_model_len=256, max_concurrent=4, kv_cache_bytes=64 << 20, gpus=0, follows_store=False,
    threads=int(sys.argv[3]))
os.environ.update(options.environment())
from etude.inference.engine import replica
async def main():
    engine = replica.build(options)
    request = SampleRequest(request_id="fresh", prompt_token_ids=json.loads(sys.argv[2]),
        max_tokens=60, temperature=0.0)
    [piece] = [piece async for piece in engine.generate(request)]
    print(json.dumps([list(piece.token_ids), list(piece.logprobs)]), flush=True)
    os._exit(0)
asyncio.run(main())
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bench(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    folder = tmp_path_factory.mktemp("deltas")
    options = EngineOptions(
        model=make_model(folder / "model"),
        served_name="tiny",
        dtype="float32",
        max_model_len=256,
        max_concurrent=8,
        kv_cache_bytes=64 << 20,
        gpus=0,
        follows_store=True,
        # What this process has already: sums in another order have other last bits.
        threads=torch.get_num_threads(),
    )
    os.environ.update(options.environment())
    torch._dynamo.config.disable = True
    engine = replicas.build_replica(options)
    oracle = Oracle(options.model)
    store = MemoryStore()
    weights.claim_epoch(store, holder="t", parent=None, reason="start")
    policy = TrainedPolicy(oracle.schema(), oracle.words())
    receiver = VersionFollower(
        stager=Stager(store, RUN, folder / "scratch"),
        engine=engine,
        status=ReplicaStatus(replica="r-0"),
    )
    yield Bench(engine, receiver, policy, oracle, store)
    engine.shutdown()


async def test_a_complete_version_makes_it_ready(bench: Bench) -> None:
    version = bench.publish(complete=True)
    await bench.receiver.catch_up()
    assert bench.receiver.status.is_ready
    await bench.assert_exact(version)


async def test_every_delta_is_exact_when_it_is_live(bench: Bench) -> None:
    for _ in range(4):
        learn(bench.policy)
        version = bench.publish()
        await bench.receiver.catch_up()
        await bench.assert_exact(version)
        assert await bench.engine.swap.audit()


async def test_requests_run_through_swaps_and_their_spans_cover_every_token(bench: Bench) -> None:
    running = [
        asyncio.create_task(bench.sample(f"load-{i}", count=200, temperature=1.0), name=f"load-{i}")
        for i in range(8)
    ]
    for _ in range(6):
        await asyncio.sleep(0.1)
        learn(bench.policy, 0.01)
        bench.publish()
        await bench.receiver.catch_up()
    swapped = 0
    for task in running:
        found = await task
        assert (found.finish, len(found.tokens)) == (Finish.LENGTH, 200)
        ends = [label.end for label in found.labels]
        assert [label.start for label in found.labels] == [0, *ends[:-1]]
        assert ends[-1] == 200
        numbers = [VersionId.parse(label.label).number for label in found.labels]
        assert numbers == sorted(numbers)
        swapped += len(numbers) > 1
    assert swapped == len(running)


async def test_a_commit_that_fails_half_way_is_undone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bench.engine.live
    assert before is not None
    learn(bench.policy)
    version = bench.publish()
    activate = Rank.activate
    monkeypatch.setattr(Rank, "activate", lambda rank: activate(rank) and False)
    with pytest.raises(UnavailableError, match="rank 0"):
        await bench.receiver.catch_up()
    await bench.assert_exact(before)
    monkeypatch.undo()
    await bench.receiver.catch_up()
    await bench.assert_exact(version)


async def test_going_back_is_exact_and_leaves_no_old_keys_and_values(bench: Bench) -> None:
    running = asyncio.create_task(bench.sample("back", count=200, temperature=1.0), name="back")
    await asyncio.sleep(0.2)
    await bench.engine.swap.restore()
    older = bench.engine.live
    assert older is not None
    assert (await running).finish is Finish.LENGTH
    await bench.assert_exact(older)
    await bench.receiver.catch_up()
    await bench.assert_exact(VersionId(1, bench.number))


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - an engine has no events
            await asyncio.sleep(0.01)


async def test_draining_lets_running_requests_end_under_their_version(bench: Bench) -> None:
    bench.engine.options = replace(bench.engine.options, pause="Drain")
    running = asyncio.create_task(bench.sample("drain", count=200), name="drain")
    await until(bench.engine._unfinished)
    learn(bench.policy)
    version = bench.publish()
    swap = asyncio.create_task(bench.receiver.catch_up(), name="swap")
    await until(lambda: swap.done() or not bench.engine._gate.is_set())
    late = asyncio.create_task(bench.sample("late"), name="late")
    assert len((await running).labels) == 1
    await swap
    assert [label.label for label in (await late).labels] == [str(version)]


async def test_aborting_hands_back_what_was_sampled_with_its_spans(bench: Bench) -> None:
    bench.engine.options = replace(bench.engine.options, pause="Abort")
    running = asyncio.create_task(bench.sample("abort", count=240), name="abort")
    await asyncio.sleep(0.2)
    learn(bench.policy)
    version = bench.publish()
    await bench.receiver.catch_up()
    found = await running
    assert found.finish is Finish.ABORT
    assert 0 < len(found.tokens) < 240
    assert found.labels[-1].end == len(found.tokens)
    await bench.assert_exact(version)


async def test_recomputed_requests_go_on_as_if_the_new_version_had_read_everything(
    bench: Bench,
) -> None:
    options = replace(bench.engine.options, pause="InFlight", recompute_kv=True)
    bench.engine.options = options
    running = asyncio.create_task(bench.sample("anew", count=200, temperature=1.0), name="anew")
    await asyncio.sleep(0.2)
    learn(bench.policy)
    version = bench.publish()
    await bench.receiver.catch_up()
    found = await running
    assert found.labels[-1].label == str(version)
    swap = found.labels[-1].start
    assert 0 < swap < 200
    # Without a recompute the older keys and values would show in every log-probability.
    expected = bench.oracle.logprobs(bench.policy.published[version], found.tokens)
    errors = [abs(a - b) for a, b in zip(found.logprobs, expected, strict=True)]
    assert max(errors[swap:]) < TOLERANCE < max(errors[:swap])
    bench.engine.options = replace(options, recompute_kv=False)


LONG_PROMPT = PROMPT * 20
"""Several blocks of the prefix cache."""


async def turn(bench: Bench, name: str, episode: str = "") -> TokenChunk:
    request = SampleRequest(
        request_id=name,
        prompt_token_ids=LONG_PROMPT,
        max_tokens=8,
        temperature=0.0,
        rollout=episode,
    )
    [piece] = [piece async for piece in bench.engine.generate(request)]
    return piece


def is_exact(bench: Bench, piece: TokenChunk) -> bool:
    """Whether no key or value that it attended to was of older weights."""
    words = bench.policy.published[VersionId(1, bench.number)]
    rest = [*LONG_PROMPT[len(PROMPT) :], *piece.token_ids]
    expected = bench.oracle.logprobs(words, rest)[-len(piece.token_ids) :]
    errors = [abs(a - b) for a, b in zip(piece.logprobs, expected, strict=True)]
    return max(errors) < TOLERANCE


async def swapped(bench: Bench) -> VersionId:
    learn(bench.policy)
    version = bench.publish()
    await bench.receiver.catch_up()
    return version


async def test_a_sticky_episode_reads_what_it_cached_under_older_weights_and_says_so(
    bench: Bench,
) -> None:
    bench.engine.prefix_cache = PrefixCacheSalts("Sticky", 2)
    first = await swapped(bench)
    assert (await turn(bench, "turn-1", "episode")).admitted == first
    second = await swapped(bench)
    kept = await turn(bench, "turn-2", "episode")
    other = await turn(bench, "other-1", "another")
    assert (kept.admitted, other.admitted) == (first, second)
    assert (is_exact(bench, kept), is_exact(bench, other)) == (False, True)
    third = await swapped(bench)
    given_up = await turn(bench, "turn-3", "episode")
    assert (given_up.admitted, is_exact(bench, given_up)) == (third, True)


@pytest.mark.parametrize("mode", ["Salted", "Reset"])
async def test_no_prefix_is_shared_across_a_swap_unless_it_is_sticky(
    bench: Bench, mode: PrefixCache
) -> None:
    bench.engine.prefix_cache = PrefixCacheSalts(mode)
    for number in range(2):
        version = await swapped(bench)
        for again in range(2):
            found = await turn(bench, f"{mode}-{number}-{again}", "episode")
            assert (found.admitted, is_exact(bench, found)) == (version, True)
    bench.engine.prefix_cache = PrefixCacheSalts()


async def test_each_option_reaches_the_part_of_the_engine_that_it_is_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("salt_by_request", "gate"):  # what the bench's own replica told the engine
        monkeypatch.setattr(bench.engine.llm, name, None)
    options = replace(
        bench.engine.options,
        may_load=False,
        recompute_kv=True,
        prefix_cache="Sticky",
        sticky_lag=5,
        undo_depth=6,
        audit_every=7,
    )
    other = replicas.Replica(bench.engine.llm, options)
    assert (other.swap.may_load, other.swap.max_undo) == (False, 6)
    assert other.prefix_cache == PrefixCacheSalts("Sticky", 5)
    assert (other.info.recomputes_kv_cache, bench.engine.info.recomputes_kv_cache) == (True, False)
    spec = yaml.safe_load((ROOT / "examples" / "demo" / "rlrun.yaml").read_text())["spec"]
    run = ResolvedRun.model_validate(
        {"name": "tiny", "uid": RUN, "spec": {**spec, "storage": {"uri": tmp_path.as_uri()}}}
    )
    settings = Settings(run_file=tmp_path, scratch=tmp_path, threads=1, port=0, http_port=0)
    role = InferenceRole(settings=settings, run=run, replica=other, probes=Probes(0))
    assert role.follower.audit_every == 7


async def test_weights_that_come_past_the_store_are_refused_and_it_serves_on(bench: Bench) -> None:
    for _ in range(2):
        with pytest.raises(Exception, match="object store only"):
            await bench.engine.llm.start_weight_update()
    await bench.assert_exact(await swapped(bench))


async def test_a_hundred_swaps_leave_no_memory_behind(bench: Bench) -> None:
    async def swaps(count: int) -> int:
        for _ in range(count):
            bench.policy.step(0.02)
            bench.publish()
            # The oracle's copies of versions are not what is measured.
            bench.policy.published = dict(list(bench.policy.published.items())[-2:])
            await bench.receiver.catch_up()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = await swaps(20)
    assert await swaps(100) - before < MAX_GROWTH_KIB
    await bench.assert_exact(VersionId(1, bench.number))


@pytest.mark.long
async def test_a_fresh_engine_on_the_exported_weights_samples_exactly_the_same(
    bench: Bench, tmp_path: Path
) -> None:
    learn(bench.policy)
    bench.publish()
    await bench.receiver.catch_up()
    found = await bench.sample("swapped", count=60)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bench.engine.options.model / name).read_bytes())
    tensors = {
        spec.name: torch.from_numpy(bench.policy.words[spec.name].view(np.float32)).view(spec.shape)
        for spec in bench.policy.schema.tensors
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    fresh = await asyncio.to_thread(
        subprocess.run,
        [
            *(sys.executable, "-c", FRESH, str(tmp_path), json.dumps(PROMPT)),
            str(bench.engine.options.threads),
        ],
        check=True,
        capture_output=True,
    )
    assert json.loads(fresh.stdout.splitlines()[-1]) == [found.tokens, found.logprobs]
