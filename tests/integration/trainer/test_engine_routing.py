"""Rollouts on several engines over real gRPC: all sample, and tokens survive an engine's end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest
from typing_extensions import override

from etude.agent.completions import Completion, FinishReason, find_inconsistency
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.errors import UnavailableError
from etude.common.routed_experts import RouteRows
from etude.common.rpc import channels
from etude.common.rpc.server import Server
from etude.common.weights import VersionId
from etude.inference.engine.fake import MemoryEngine
from etude.inference.engine.interface import EngineInfo, Finish, SampleRequest, TokenChunk
from etude.inference.service import InferenceServicer
from etude.trainer.rollouts.engine_client import MESSAGE_TOKENS, EngineSampler
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.routing.router import Router
from etude.trainer.routing.table import EngineState, Purpose, RoutingTable
from etude.v1 import inference_pb2_grpc

INFO = EngineInfo(model="m", vocab_size=1 << 30, max_model_len=8_192, max_concurrent=64)
END_ID = 4
"""Sampled once in a billion tokens."""
LENGTH = 5 * MESSAGE_TOKENS + 7


@dataclass(slots=True)
class SlowEngine(MemoryEngine):
    """Pauses after each chunk; aborts running requests on demand."""

    pause_s: float = 0.0
    aborts: int = 0
    requests: list[SampleRequest] = field(default_factory=list)
    false_routes: RouteRows | None = None
    """Experts of tokens that it sends instead of theirs."""

    @override
    async def generate(self, request: SampleRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        async for sampled in MemoryEngine.generate(self, request):
            chunk = sampled
            if self.false_routes is not None:
                chunk = replace(sampled, routes=self.false_routes)
            await asyncio.sleep(self.pause_s)
            if self.aborts:
                self.aborts -= 1
                yield TokenChunk(
                    token_ids=chunk.token_ids,
                    logprobs=chunk.logprobs,
                    finish=Finish.ABORT,
                    labels=chunk.labels,
                    admitted=chunk.admitted,
                    routes=chunk.routes,
                )
                return
            yield chunk


@dataclass(slots=True)
class Fleet:
    """Two engines on ports of their own, and a router that knows both."""

    engines: list[SlowEngine]
    servers: list[Server]
    targets: list[str]
    router: Router = field(default_factory=Router)

    def set_states(self, *states: EngineState, evaluation: frozenset[str] = frozenset()) -> None:
        table = RoutingTable(
            revision=self.router.table.revision + 1,
            engines=tuple(zip(self.targets, states, strict=False)),
            evaluation=evaluation,
        )
        self.router.use_table(table)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    engines = [SlowEngine(INFO) for _ in range(2)]
    servers = []
    for place, engine in enumerate(engines):
        await engine.relabel(VersionId(1, 3), drop_cache=False)
        server = Server(["inference"])
        service = InferenceServicer(engine=engine, http_port=0, instance=str(place))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server.grpc_server)
        await server.start()
        servers.append(server)
    made = Fleet(engines, servers, [f"127.0.0.1:{server.port}" for server in servers])
    made.set_states(EngineState.LIVE, EngineState.LIVE)
    yield made
    for server in servers:
        await server.stop(0)


Make = Callable[..., EngineSampler]


@pytest.fixture
async def sampler(fleet: Fleet) -> AsyncIterator[Make]:
    dialled = {target: channels.dial(target) for target in fleet.targets}

    def make(rollout: int = 0, group: str = "g", *, outage_s: float = 20.0) -> EngineSampler:
        return EngineSampler(
            engine_of=lambda target: inference_pb2_grpc.InferenceServiceStub(dialled[target]),
            router=fleet.router,
            group_id=group,
            rollout_id=f"{group}-{rollout}",
            end_ids={END_ID},
            outage=OutageBudget(outage_s),
            timeout_s=60.0,
        )

    yield make
    for channel in dialled.values():
        await channel.close()


async def sample(sampler: EngineSampler, *, length: int = LENGTH, first: int = 1) -> Completion:
    prompt = [first, 2, 3]
    async with asyncio.timeout(30):
        done = await sampler.generate(prompt, max_tokens=length, temperature=1.0, seed=7)
    wrong = find_inconsistency(done, max_tokens=length, vocab_size=1 << 30, end_ids={END_ID})
    assert wrong == ""
    return done


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - an engine announces nothing
            await asyncio.sleep(0.005)


async def test_both_of_two_engines_sample(fleet: Fleet, sampler: Make) -> None:
    for engine in fleet.engines:
        engine.pause_s = 0.05
    done = await asyncio.gather(*(sample(sampler(0, f"g{n}")) for n in range(8)))
    replicas = [each.spans[0].replica for each in done]
    assert sorted(replicas) == ["0"] * 4 + ["1"] * 4


async def test_one_token_slot_has_completions_one_after_the_other_on_the_platforms_time(
    fleet: Fleet, sampler: Make
) -> None:
    for engine in fleet.engines:
        engine.pause_s = 0.05
    fleet.router.use_table(replace(fleet.router.table, token_slots=1))
    samplers = [sampler(0, f"g{number}") for number in range(3)]
    tasks = [asyncio.create_task(sample(each, length=8)) for each in samplers]
    await until(lambda: any(engine.requests for engine in fleet.engines))
    assert sum(len(engine.requests) for engine in fleet.engines) == 1
    await asyncio.gather(*tasks)
    waits_s = [each.outage.lost_s for each in samplers]
    assert waits_s[0] < min(waits_s[1:])
    assert waits_s[1] < waits_s[2]
    assert not any(each.outage.stalled_s for each in samplers)


async def test_the_longest_prompt_that_a_run_allows_fits_into_a_message(
    fleet: Fleet, sampler: Make
) -> None:
    most = RolloutPolicy.model_json_schema()["properties"]["maxTokens"]["maximum"]
    for engine in fleet.engines:
        engine.info = replace(INFO, max_model_len=most)
    prompt = [(1 << 21) - 1] * (most - 1)
    await sampler().generate(prompt, max_tokens=1, temperature=1.0, seed=7)
    [request] = [request for engine in fleet.engines for request in engine.requests]
    assert len(request.prompt_token_ids) == most - 1


async def test_an_engine_that_dies_costs_no_token_that_it_delivered(
    fleet: Fleet, sampler: Make
) -> None:
    whole = await sample(sampler(0))
    first = int(whole.spans[0].replica)
    fleet.engines[first].pause_s = 0.1
    rollout = sampler(0)
    running = asyncio.create_task(sample(rollout))
    target = fleet.targets[first]
    await until(lambda: fleet.router.own_loads().get(target, (0, 0))[1] > 2 * MESSAGE_TOKENS)
    await fleet.servers[first].stop(0)
    continued = await running

    assert continued.token_ids == whole.token_ids
    assert [span.replica for span in continued.spans] == [str(first), str(1 - first)]
    [request] = fleet.engines[1 - first].requests
    kept = continued.spans[0].end
    assert kept >= 2 * MESSAGE_TOKENS
    assert request.prompt_token_ids == [1, 2, 3, *continued.token_ids[:kept]]
    assert request.max_tokens == LENGTH - kept
    assert request.seed not in {7, None}
    assert rollout.counts.interrupted == 1
    assert 0 < rollout.outage.lost_s < 5


async def test_a_draining_engine_hands_its_completions_over(fleet: Fleet, sampler: Make) -> None:
    whole = await sample(sampler(0))
    first = int(whole.spans[0].replica)
    fleet.engines[first].pause_s = 0.1
    rollout = sampler(0)
    running = asyncio.create_task(sample(rollout))
    target = fleet.targets[first]
    await until(lambda: fleet.router.own_loads().get(target, (0, 0))[1] > MESSAGE_TOKENS)
    states = [EngineState.LIVE, EngineState.LIVE]
    states[first] = EngineState.DRAINING
    fleet.set_states(*states)
    continued = await running

    assert continued.token_ids == whole.token_ids
    assert {span.replica for span in continued.spans} == {"0", "1"}
    assert rollout.outage.lost_s == 0
    await until(lambda: not fleet.engines[first].running)


async def test_an_engine_that_joins_serves_rollouts_in_flight(fleet: Fleet, sampler: Make) -> None:
    fleet.set_states(EngineState.LIVE)
    rollouts = [sampler(0, f"g{n}") for n in range(6)]
    for engine in fleet.engines:
        engine.pause_s = 0.05
    await asyncio.gather(*(sample(each) for each in rollouts))
    assert not fleet.engines[1].requests
    fleet.set_states(EngineState.LIVE, EngineState.LIVE)
    await asyncio.gather(*(sample(each) for each in rollouts))
    assert fleet.engines[1].requests


async def test_an_aborted_completion_goes_on_from_its_tokens(fleet: Fleet, sampler: Make) -> None:
    whole = await sample(sampler(0))
    for engine in fleet.engines:
        engine.aborts = 1
    continued = await sample(sampler(1, "h"))
    assert continued.token_ids == whole.token_ids
    assert continued.finish is FinishReason.LENGTH


async def test_a_lagging_engine_gets_no_new_call(fleet: Fleet, sampler: Make) -> None:
    fleet.set_states(EngineState.LAGGING, EngineState.LIVE)
    for n in range(4):
        await sample(sampler(0, f"g{n}"))
    assert not fleet.engines[0].requests


async def test_evaluations_stay_on_their_own_engines(fleet: Fleet, sampler: Make) -> None:
    fleet.set_states(EngineState.LIVE, EngineState.LIVE, evaluation=frozenset({fleet.targets[1]}))
    for n in range(4):
        await sample(sampler(0, f"g{n}"))
        evaluated = sampler(0, f"e{n}")
        evaluated.purpose = Purpose.EVALUATION
        await sample(evaluated)
    assert {r.rollout[0] for r in fleet.engines[0].requests} == {"g"}
    assert {r.rollout[0] for r in fleet.engines[1].requests} == {"e"}


async def test_only_the_absence_of_every_engine_ends_a_rollout(fleet: Fleet, sampler: Make) -> None:
    await fleet.servers[0].stop(0)
    for n in range(4):
        await sample(sampler(0, f"g{n}", outage_s=0.0))
    await fleet.servers[1].stop(0)
    with pytest.raises(UnavailableError, match="engine"):
        await sample(sampler(0, "h", outage_s=0.6))
    fleet.set_states()
    with pytest.raises(UnavailableError, match="none takes calls"):
        await sample(sampler(0, "h", outage_s=0.6))


async def test_without_faults_one_engine_gets_the_seeds_of_its_callers(
    fleet: Fleet, sampler: Make
) -> None:
    fleet.set_states(EngineState.LIVE)
    rollout = sampler(0)
    await sample(rollout)
    await sample(rollout, length=9)
    assert [(r.request_id, r.seed, r.max_tokens) for r in fleet.engines[0].requests] == [
        ("g-0/1", 7, LENGTH),
        ("g-0/2", 7, 9),
    ]
