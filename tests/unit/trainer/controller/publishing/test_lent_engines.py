"""Engines of routes in a run's routing table: used while they are lent and serve its version."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from typing_extensions import override

from etude.common.rpc.server import Server
from etude.common.weights import VersionId
from etude.trainer.controller.publishing.engines import Engines
from etude.trainer.controller.publishing.lent_engines import LentEngines
from etude.trainer.routing.table import EngineState, Purpose
from etude.v1 import weights_pb2, weights_pb2_grpc

NEWEST = VersionId(1, 7)


@dataclass(slots=True)
class Lender(weights_pb2_grpc.WeightServiceServicer):
    """Engine of a route, as a test says it is."""

    lending: int = weights_pb2.LENDING_STATE_SERVING
    number: int = 3

    @override
    async def GetWeightStatus(
        self,
        request: weights_pb2.GetWeightStatusRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.GetWeightStatusRequest, weights_pb2.GetWeightStatusResponse
        ],
    ) -> weights_pb2.GetWeightStatusResponse:
        status = weights_pb2.WeightStatus(
            live=weights_pb2.PolicyVersion(epoch=1, number=self.number),
            lending=self.lending,  # type: ignore[arg-type]  # a number of the enum
        )
        return weights_pb2.GetWeightStatusResponse(status=status)


@dataclass
class Borrower:
    """A run with an engine of its own, and an engine of a route that it may use."""

    engines: Engines
    lender: Lender
    target: str

    async def states(self) -> dict[str, EngineState]:
        await self.engines.lent.look([self.target])
        return dict(self.engines.lent.entries(NEWEST))


@pytest.fixture
async def borrower() -> AsyncIterator[Borrower]:
    lender, server = Lender(), Server([])  # type: ignore[abstract]  # nothing else is asked for
    weights_pb2_grpc.add_WeightServiceServicer_to_server(lender, server.grpc_server)
    await server.start()
    engines = Engines(["127.0.0.1:1"], timeout_s=1.0, lent=LentEngines())
    yield Borrower(engines, lender, f"127.0.0.1:{server.port}")
    await engines.close()
    await server.stop(0)


async def test_an_engine_that_serves_users_is_not_in_the_table(borrower: Borrower) -> None:
    assert await borrower.states() == {}


async def test_a_lent_engine_takes_calls_once_it_serves_the_newest_version(
    borrower: Borrower,
) -> None:
    borrower.lender.lending = weights_pb2.LENDING_STATE_LENT
    assert await borrower.states() == {borrower.target: EngineState.LAGGING}
    borrower.lender.number = NEWEST.number
    assert await borrower.states() == {borrower.target: EngineState.LIVE}


@pytest.mark.parametrize("how", ["recalled", "unknown"])
async def test_rollouts_leave_an_engine_that_users_have_again(borrower: Borrower, how: str) -> None:
    borrower.lender.lending = weights_pb2.LENDING_STATE_LENT
    borrower.lender.number = NEWEST.number
    await borrower.states()
    if how == "unknown":
        await borrower.engines.lent.look([])
        assert not list(borrower.engines.lent.entries(NEWEST))
        return
    borrower.lender.lending = weights_pb2.LENDING_STATE_RETURNING
    assert await borrower.states() == {borrower.target: EngineState.DRAINING}


async def test_lent_engines_stand_beside_the_runs_own_in_the_routing_table(
    borrower: Borrower,
) -> None:
    own, engines = borrower.engines.targets[0], borrower.engines
    engines.rotation = (own,)
    before = engines.routing_table()
    assert before.candidates(Purpose.TRAINING) == (own,)
    borrower.lender.lending = weights_pb2.LENDING_STATE_LENT
    await borrower.states()
    table = engines.routing_table()
    assert table.revision > before.revision
    assert borrower.target in table.usable()
    assert engines.num_addressed == 0, "the run's own are counted, and no others"
