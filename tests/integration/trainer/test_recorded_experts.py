"""Experts that engines record come back with completions, over real gRPC, and are stored."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.trainer.test_continued_rollouts import (
    CALL,
    EDIT,
    make_order,
    rollouts,
    run_until_killed,
)
from tests.integration.trainer.test_engine_routing import INFO, SlowEngine

from etude.agent.completions import Completion
from etude.common.api.storage import Storage
from etude.common.blobs import open_store
from etude.common.errors import InvalidFieldError
from etude.common.routed_experts import RouteRows
from etude.common.rpc import channels
from etude.common.rpc.server import Server
from etude.common.weights import VersionId
from etude.inference.engine.fake import route_tokens
from etude.inference.service import InferenceServicer
from etude.trainer.learner.batches import StoredRoutes
from etude.trainer.learner.routes.replay import read_routes
from etude.trainer.rollouts.engine_client import MESSAGE_TOKENS, EngineSampler
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.rollouts.protocol import WorkerConfig
from etude.trainer.rollouts.worker import RolloutWorker
from etude.trainer.routing.router import Router
from etude.trainer.routing.table import EngineState, RoutingTable
from etude.v1 import inference_pb2_grpc, rollout_pb2

PROMPT, LENGTH = [1, 2, 3], 3 * MESSAGE_TOKENS + 5
SHAPE = (2, 2)


@dataclass(slots=True)
class Engines:
    """Engines that record experts, on ports of their own."""

    engines: list[SlowEngine]
    router: Router = field(default_factory=Router)
    sampler: EngineSampler = field(init=False)


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    made = Engines([SlowEngine(replace(INFO, records_routes=True)) for _ in range(2)])
    servers, dialled = [], {}
    for place, engine in enumerate(made.engines):
        await engine.relabel(VersionId(1, 3), drop_cache=False)
        server = Server(["inference"])
        service = InferenceServicer(engine=engine, http_port=0, instance=str(place))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server.grpc_server)
        await server.start()
        servers.append(server)
        target = f"127.0.0.1:{server.port}"
        dialled[target] = channels.dial(target)
    live = tuple((target, EngineState.LIVE) for target in dialled)
    made.router.use_table(RoutingTable(revision=1, engines=live))
    made.sampler = EngineSampler(
        engine_of=lambda target: inference_pb2_grpc.InferenceServiceStub(dialled[target]),
        router=made.router,
        group_id="g",
        rollout_id="g-0",
        end_ids={4},
        outage=OutageBudget(20.0),
        timeout_s=60.0,
        records_routes=True,
    )
    yield made
    for channel in dialled.values():
        await channel.close()
    for server in servers:
        await server.stop(0)


async def sample(engines: Engines, prompt: list[int]) -> Completion:
    async with asyncio.timeout(30):
        return await engines.sampler.generate(prompt, max_tokens=LENGTH, temperature=1.0, seed=7)


def requests(engines: Engines) -> list[Any]:
    return [request for engine in engines.engines for request in engine.requests]


async def test_a_turn_brings_the_experts_of_all_tokens_that_had_none(engines: Engines) -> None:
    first = await sample(engines, PROMPT)
    context = [*PROMPT, *first.token_ids]
    assert first.routes is not None
    assert first.routes.start == 0
    assert (first.routes.ids == route_tokens(context[:-1])).all()

    second = await sample(engines, [*context, 8, 9])
    assert second.routes is not None
    # The last token of the turn before is processed with this prompt.
    assert second.routes.start == len(context) - 1
    whole = [*context, 8, 9, *second.token_ids]
    assert (second.routes.ids == route_tokens(whole[len(context) - 1 : -1])).all()

    third = await sample(engines, [*PROMPT, 8, 9])  # a new context
    assert third.routes is not None
    assert third.routes.start == 0
    assert sorted(r.routes_from for r in requests(engines)) == [0, 0, len(context) - 1]


async def test_experts_of_a_completion_survive_the_end_of_its_engine(engines: Engines) -> None:
    for engine in engines.engines:
        engine.aborts = 1  # with the first of its messages
    done = await sample(engines, PROMPT)
    assert engines.sampler.counts.interrupted == 1
    assert done.routes is not None
    assert done.routes.start == 0
    assert (done.routes.ids == route_tokens([*PROMPT, *done.token_ids][:-1])).all()
    asked = sorted(request.routes_from for request in requests(engines))
    assert asked[0] == 0
    assert asked[1:] == sorted(asked[1:])


async def test_an_engine_that_records_none_says_so_by_field(engines: Engines) -> None:
    for engine in engines.engines:
        engine.info = INFO
    with pytest.raises(grpc.aio.AioRpcError, match=r"routes_from: this engine records no experts"):
        await sample(engines, PROMPT)


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        (RouteRows(1, route_tokens(PROMPT)), r"routes\.start: 1 where 0 was due"),
        (RouteRows(0, route_tokens(range(LENGTH + 4))), r"routes\.ids: rows up to 2"),
    ],
)
async def test_rows_that_cannot_be_of_the_call_are_refused(
    engines: Engines, given: RouteRows, refusal: str
) -> None:
    for engine in engines.engines:
        engine.false_routes = given
    with pytest.raises(InvalidFieldError, match=refusal):
        await sample(engines, PROMPT)


@pytest.fixture
def task_uri(tmp_path: Path) -> str:
    folder = tmp_path / "tasks" / "fix-add"
    folder.mkdir(parents=True)
    (folder / "instruction.md").write_text("Fix add.\n")
    (folder / "task.toml").write_text("")
    return folder.as_uri()


@pytest.fixture
def config(partners: Any, model_folder: Path, tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(
        run="run",
        model_folder=model_folder,
        brokers={"repos": partners.target},
        templates={"repos": "python"},
        rewards_target=partners.target,
        score_timeout_s=30,
        storage=Storage(uri=f"file://{tmp_path}/run"),
        outage_s=5,
    )


@pytest.fixture
async def worker(config: WorkerConfig) -> AsyncIterator[RolloutWorker]:
    made = RolloutWorker(config)
    yield made
    await made.close()


def assert_stored(config: WorkerConfig, rollout: rollout_pb2.Rollout) -> None:
    """All experts of a rollout are in the store, and are those of its tokens."""
    [link] = rollout.links
    stored = StoredRoutes(link.routes.key, link.routes.digest)
    store = open_store(config.storage.uri)
    found = read_routes(store, stored, tokens=len(link.token_ids), shape=SHAPE)
    assert (found[:-1] == route_tokens(link.token_ids[:-1])).all()
    assert (found[-1] == np.iinfo(found.dtype).max).all()


async def test_experts_lie_beside_the_rollout_and_the_record_names_them(
    partners: Any, config: WorkerConfig, worker: RolloutWorker, task_uri: str
) -> None:
    order = replace(make_order(partners, task_uri), records_routes=True)
    result = await worker.run_group(order)
    found = rollouts(result)
    keys = {record.rollout.links[0].routes.key for record in found}
    assert len(keys) == 2
    assert all(key.startswith(f"routes/{order.group_id}/") for key in keys)
    for record in found:
        assert_stored(config, record.rollout)


async def test_a_rollout_that_is_not_asked_for_experts_has_none(
    partners: Any, config: WorkerConfig, worker: RolloutWorker, task_uri: str
) -> None:
    result = await worker.run_group(make_order(partners, task_uri))
    links = [link for record in rollouts(result) for link in record.rollout.links]
    assert not any(link.HasField("routes") for link in links)
    assert not any(r.HasField("routes_from") for r in partners.engine.requests)


async def test_a_continued_rollout_keeps_the_experts_of_its_earlier_turns(
    partners: Any, config: WorkerConfig, worker: RolloutWorker, task_uri: str
) -> None:
    partners.engine.turns = (CALL, EDIT, "Done.")
    order = replace(make_order(partners, task_uri), records_routes=True)
    await run_until_killed(partners, config, order, answers=4)
    result = await worker.run_group(replace(order, dispatch=1, is_continued=True))
    for record in rollouts(result):
        assert_stored(config, record.rollout)
