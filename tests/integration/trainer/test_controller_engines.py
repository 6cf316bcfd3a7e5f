"""Serving a version on engines that start late, lag, or cannot."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import pytest
from typing_extensions import override

from etude.common.errors import CorruptError, EtudeError, UnavailableError
from etude.common.rpc.server import Server
from etude.common.weights import VersionId
from etude.trainer.controller.publishing.engines import (
    Engines,
    EnginesLateError,
    VersionRefusedError,
)
from etude.v1 import weights_pb2, weights_pb2_grpc

VERSION = VersionId(2, 7)


@dataclass(slots=True)
class Replica(weights_pb2_grpc.WeightServiceServicer):
    """Takes its time to serve a version, or refuses it."""

    target: str = ""
    delay_s: float = 0.0
    refusals: int = 0
    error: EtudeError | None = None
    live: VersionId | None = None
    pinned: VersionId | None = None
    announced: list[VersionId] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    others: "list[Replica]" = field(default_factory=list)
    staged_elsewhere: list[bool] = field(default_factory=list)
    """At each commit, whether every other replica was prepared."""

    @override
    async def CommitVersion(
        self,
        request: weights_pb2.CommitVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.CommitVersionRequest, weights_pb2.CommitVersionResponse
        ],
    ) -> weights_pb2.CommitVersionResponse:
        if self.refusals:
            self.refusals -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "still loading")
        if self.error is not None:
            raise self.error
        if "stage" not in self.calls:
            await asyncio.sleep(self.delay_s)
        self.staged_elsewhere.append(all("stage" in each.calls for each in self.others))
        self.live = VersionId.from_proto(request.version)
        status = weights_pb2.WeightStatus(live=request.version, last_pause_seconds=0.004)
        return weights_pb2.CommitVersionResponse(status=status)

    @override
    async def GetWeightStatus(
        self,
        request: weights_pb2.GetWeightStatusRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.GetWeightStatusRequest, weights_pb2.GetWeightStatusResponse
        ],
    ) -> weights_pb2.GetWeightStatusResponse:
        live = None if self.live is None else self.live.to_proto()
        return weights_pb2.GetWeightStatusResponse(status=weights_pb2.WeightStatus(live=live))

    @override
    async def WatchWeightStatus(
        self,
        request: weights_pb2.WatchWeightStatusRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.WatchWeightStatusRequest, weights_pb2.WatchWeightStatusResponse
        ],
    ) -> AsyncIterator[weights_pb2.WatchWeightStatusResponse]:
        yield weights_pb2.WatchWeightStatusResponse()

    @override
    async def AnnounceVersion(
        self,
        request: weights_pb2.AnnounceVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.AnnounceVersionRequest, weights_pb2.AnnounceVersionResponse
        ],
    ) -> weights_pb2.AnnounceVersionResponse:
        self.announced.append(VersionId.from_proto(request.version))
        return weights_pb2.AnnounceVersionResponse()

    @override
    async def StageVersion(
        self,
        request: weights_pb2.StageVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.StageVersionRequest, weights_pb2.StageVersionResponse
        ],
    ) -> weights_pb2.StageVersionResponse:
        if self.error is not None:
            raise self.error
        await asyncio.sleep(self.delay_s)
        self.calls.append("stage")
        return weights_pb2.StageVersionResponse()

    @override
    async def RollbackVersion(
        self,
        request: weights_pb2.RollbackVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.RollbackVersionRequest, weights_pb2.RollbackVersionResponse
        ],
    ) -> weights_pb2.RollbackVersionResponse:
        self.live = VersionId.from_proto(request.version)
        self.calls.append("roll back")
        status = weights_pb2.WeightStatus(live=request.version)
        return weights_pb2.RollbackVersionResponse(status=status)

    @override
    async def SetTarget(
        self,
        request: weights_pb2.SetTargetRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.SetTargetRequest, weights_pb2.SetTargetResponse
        ],
    ) -> weights_pb2.SetTargetResponse:
        self.pinned = VersionId.from_proto(request.version)
        return weights_pb2.SetTargetResponse()

    @override
    async def SetLending(
        self,
        request: weights_pb2.SetLendingRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.SetLendingRequest, weights_pb2.SetLendingResponse
        ],
    ) -> weights_pb2.SetLendingResponse:
        raise AssertionError("controllers lend no engine")


@pytest.fixture
async def replicas() -> AsyncIterator[list[Replica]]:
    servers, made = [], []
    for _ in range(2):
        replica, server = Replica(), Server(["weights"])
        weights_pb2_grpc.add_WeightServiceServicer_to_server(replica, server.grpc_server)
        await server.start()
        replica.target = f"127.0.0.1:{server.port}"
        servers.append(server)
        made.append(replica)
    for replica in made:
        replica.others = [each for each in made if each is not replica]
    yield made
    for server in servers:
        await server.stop(0.1)


Make = Callable[..., Engines]


@pytest.fixture
async def engines(replicas: list[Replica]) -> AsyncIterator[Make]:
    made: list[Engines] = []

    def make(
        *targets: str,
        timeout_s: float = 20.0,
        grace_s: float = 20.0,
        together_s: float | None = None,
    ) -> Engines:
        found = Engines(targets or [r.target for r in replicas], timeout_s, grace_s, together_s)
        made.append(found)
        return found

    yield make
    for each in made:
        await each.close()


async def test_every_replica_serves_the_version(replicas: list[Replica], engines: Make) -> None:
    serving = engines()
    await serving.activate(VERSION)
    assert [r.live for r in replicas] == [VERSION, VERSION]
    assert serving.rotation == tuple(r.target for r in replicas)
    assert serving.last_pause_s == pytest.approx(0.004)


async def test_an_engine_that_still_starts_is_waited_for(
    replicas: list[Replica], engines: Make
) -> None:
    replicas[0].refusals = 6
    serving = engines(replicas[0].target)
    await serving.activate(VERSION)
    assert replicas[0].live == VERSION


async def test_a_replica_that_lags_leaves_rotation_and_comes_back(
    replicas: list[Replica], engines: Make
) -> None:
    replicas[1].delay_s = 30.0
    serving = engines(grace_s=0.2)
    await serving.activate(VERSION)
    assert serving.rotation == (replicas[0].target,)
    replicas[1].delay_s = 0.0
    serving.grace_s = 20.0
    await serving.activate(VersionId(2, 8))
    assert len(serving.rotation) == 2


async def test_a_refusal_does_not_shorten_the_time_of_the_others(
    replicas: list[Replica], engines: Make, caplog: pytest.LogCaptureFixture
) -> None:
    replicas[0].error = CorruptError("its disk is bad")
    replicas[1].delay_s = 1.0
    serving = engines(grace_s=0.1)
    await serving.activate(VERSION)
    assert serving.rotation == (replicas[1].target,)
    assert "its disk is bad" in caplog.text


async def test_a_dead_replica_does_not_stop_the_others(
    replicas: list[Replica], engines: Make
) -> None:
    serving = engines("127.0.0.1:1", replicas[0].target, grace_s=0.5)
    await serving.activate(VERSION)
    assert serving.rotation == (replicas[0].target,)


async def test_no_engine_in_time_is_an_error_that_names_them(
    replicas: list[Replica], engines: Make
) -> None:
    replicas[0].delay_s = 30.0
    with pytest.raises(EnginesLateError, match=replicas[0].target):
        await engines(replicas[0].target, timeout_s=0.3).activate(VERSION)


async def test_damaged_weights_are_reported_in_the_engines_words(
    replicas: list[Replica], engines: Make
) -> None:
    replicas[0].error = CorruptError(
        "weights/deltas/000002/000000000007/r0000-0123456789abcdef.dlt: content does not match"
    )
    with pytest.raises(UnavailableError, match="content does not match"):
        await engines(replicas[0].target).activate(VERSION)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - the replica tells nobody
            await asyncio.sleep(0.01)


async def test_replicas_that_swap_together_are_all_prepared_before_any_commits(
    replicas: list[Replica], engines: Make
) -> None:
    replicas[1].delay_s = 0.3
    serving = engines(together_s=20.0)
    await serving.activate(VERSION)
    assert [r.staged_elsewhere for r in replicas] == [[True], [True]]
    assert [r.pinned for r in replicas] == [VERSION, VERSION]
    assert len(serving.rotation) == 2


async def test_replicas_that_swap_together_wait_for_a_late_one_only_so_long(
    replicas: list[Replica], engines: Make
) -> None:
    replicas[1].delay_s = 1.5
    serving = engines(together_s=0.3)
    await serving.activate(VERSION)
    assert serving.rotation == (replicas[0].target,)
    assert not replicas[1].staged_elsewhere
    await until(lambda: len(serving.rotation) == 2)
    assert (replicas[1].live, replicas[1].pinned) == (VERSION, VERSION)


async def test_the_time_for_swapping_together_does_not_end_before_one_is_prepared(
    replicas: list[Replica], engines: Make
) -> None:
    replicas[0].delay_s, replicas[1].delay_s = 0.5, 30.0
    serving = engines(together_s=0.1)
    await serving.activate(VERSION)
    assert serving.rotation == (replicas[0].target,)


async def test_a_version_that_half_of_the_replicas_refuse_is_served_by_the_other_half(
    replicas: list[Replica], engines: Make
) -> None:
    for together_s in (None, 20.0):
        replicas[0].error = CorruptError("state differs")
        serving = engines(together_s=together_s)
        await serving.activate(VERSION)
        assert serving.rotation == (replicas[1].target,)


async def test_a_version_that_most_replicas_refuse_is_refused_in_their_words(
    replicas: list[Replica], engines: Make
) -> None:
    for replica in replicas:
        replica.error = CorruptError("would lead to state ab, its manifest says cd")
    for together_s in (None, 20.0):
        with pytest.raises(VersionRefusedError, match=r"version 2\.7: .* its manifest says cd"):
            await engines(together_s=together_s).activate(VERSION)


async def test_replicas_that_cannot_are_not_replicas_that_refuse(
    replicas: list[Replica], engines: Make
) -> None:
    for replica in replicas:
        replica.error = UnavailableError("no memory")
    with pytest.raises(UnavailableError) as caught:
        await engines(timeout_s=0.3).activate(VERSION)
    assert not isinstance(caught.value, VersionRefusedError)


async def test_every_replica_that_answers_is_rolled_back(
    replicas: list[Replica], engines: Make
) -> None:
    serving = engines("127.0.0.1:1", *(r.target for r in replicas), grace_s=0.5)
    await serving.activate(VERSION)
    await serving.roll_back(VersionId(2, 6))
    assert [r.live for r in replicas] == [VersionId(2, 6), VersionId(2, 6)]


async def test_a_replica_far_behind_is_named_until_it_catches_up(
    replicas: list[Replica], engines: Make
) -> None:
    serving = engines(grace_s=0.05)
    await serving.activate(VersionId(2, 7))
    assert serving.lag_problem == ""
    replicas[1].delay_s = 30.0
    for number in range(8, 16):
        await serving.activate(VersionId(2, number))
        assert serving.lag_problem == ""
    await serving.activate(VersionId(2, 16))
    assert serving.lag_problem == f"{replicas[1].target} serves 2.7; the newest version is 2.16"
    replicas[1].delay_s = 0.0
    await serving.activate(VersionId(2, 17))
    await until(lambda: serving.lag_problem == "")


async def test_a_version_is_announced_to_replicas_that_move_by_themselves(
    replicas: list[Replica], engines: Make
) -> None:
    engines().announce(VERSION)
    await until(lambda: [r.announced for r in replicas] == [[VERSION], [VERSION]])
    engines(together_s=1.0).announce(VersionId(2, 8))
    await asyncio.sleep(0.1)
    assert [r.announced for r in replicas] == [[VERSION], [VERSION]]


async def test_a_replica_that_was_lost_is_not_waited_for_again(
    replicas: list[Replica], engines: Make
) -> None:
    serving = engines("127.0.0.1:1", replicas[0].target, grace_s=1.0)
    await serving.activate(VERSION)
    serving.grace_s = 1e6
    async with asyncio.timeout(15):
        await serving.activate(VersionId(2, 8))
    assert serving.rotation == (replicas[0].target,)


async def test_engines_join_and_leave_with_a_version_and_none_serves_an_older_one(
    replicas: list[Replica], engines: Make
) -> None:
    first, second = replicas
    serving = engines()
    serving.limit = 1
    await serving.activate(VERSION)
    assert len(serving.rotation) == 1
    assert second.live is None
    serving.limit = 2
    assert len(serving.rotation) == 1, "nothing changes between two versions"
    newer, newest = VersionId(2, 8), VersionId(2, 9)
    await serving.activate(newer)
    assert set(serving.rotation) == {first.target, second.target}
    assert [r.live for r in replicas] == [newer, newer]
    serving.limit = 1
    await serving.activate(newest)
    assert set(serving.rotation) == {first.target}
    assert [r.live for r in replicas] == [newest, newer]
