"""An engine of a channel is lent to rollouts: never with users together, never at their version."""

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.release.channel_records import ChannelWriter
from tests.support.weights.publishing import TrainedPolicy

from etude.common.blobs import MemoryStore
from etude.common.errors import ForbiddenError, UnavailableError
from etude.common.release.channels import STABLE
from etude.common.rpc.channels import dial
from etude.common.rpc.server import Server
from etude.common.tls.identity import Identity
from etude.common.weights import VersionId
from etude.inference.engine.fake import MemoryEngine
from etude.inference.lending import LendingControl, LendingState
from etude.inference.service import SERVICES, InferenceServicer, WeightServicer
from etude.inference.status import ReplicaStatus
from etude.inference.updates.channel import FollowedChannel
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager
from etude.v1 import inference_pb2, inference_pb2_grpc, weights_pb2, weights_pb2_grpc

RUN = "uid-run"
DEADLINE_S = 20
LENT = weights_pb2.LENDING_STATE_LENT
SERVING = weights_pb2.LENDING_STATE_SERVING


@dataclass
class Lender:
    """An engine of a channel behind gRPC, in memory, at the version of the channel."""

    engine: MemoryEngine
    follower: VersionFollower
    control: LendingControl
    inference: "inference_pb2_grpc.InferenceServiceAsyncStub"
    weights: "weights_pb2_grpc.WeightServiceAsyncStub"
    number: int = field(default=0)

    async def lend(self, seconds: int = 60) -> weights_pb2.WeightStatus:
        request = weights_pb2.SetLendingRequest(seconds=seconds)
        return (await self.weights.SetLending(request, timeout=DEADLINE_S)).status

    async def status(self) -> weights_pb2.WeightStatus:
        request = weights_pb2.GetWeightStatusRequest()
        return (await self.weights.GetWeightStatus(request, timeout=DEADLINE_S)).status

    async def wait_for(self, lending: int, number: int) -> None:
        """Wait until the engine is in a state, at a version."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = await self.status()
                if (found.lending, found.live.number) == (lending, number):
                    return
                await asyncio.sleep(0.01)

    def generate(
        self, *, is_rollout: bool, max_tokens: int = 8
    ) -> "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]":
        self.number += 1
        request = inference_pb2.GenerateRequest(
            request_id=f"r-{self.number}",
            prompt_token_ids=[1, 2, 3],
            sampling=inference_pb2.Sampling(max_tokens=max_tokens, temperature=1.0),
            message_tokens=1,
            is_rollout=is_rollout,
        )
        return self.inference.Generate(request, timeout=DEADLINE_S)

    async def sampled_by(self, *, is_rollout: bool) -> set[int]:
        """Numbers of the versions that sampled one completion."""
        numbers = set()
        async for message in self.generate(is_rollout=is_rollout):
            numbers |= {span.sampled.number for span in message.spans}
        return numbers


@pytest.fixture
async def lender(
    store: MemoryStore, engine: MemoryEngine, policy: TrainedPolicy, tmp_path: Path
) -> AsyncIterator[Lender]:
    for number in range(4):
        policy.step()
        policy.publish(store, number)
    ChannelWriter(store, STABLE, run_uid=RUN).serve(1)
    control = LendingControl("demo")
    follower = VersionFollower(
        stager=Stager(store, RUN, tmp_path),
        engine=engine,
        status=ReplicaStatus(replica="tiny-stable-0"),
        channel=FollowedChannel(store=store, name=STABLE, run_uid=RUN, lending=control),
    )
    server = Server(SERVICES)
    servicer = InferenceServicer(engine=engine, http_port=7011, run_uid=RUN, lending=control)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.grpc_server)
    weights_pb2_grpc.add_WeightServiceServicer_to_server(
        WeightServicer(follower), server.grpc_server
    )
    await follower.catch_up()
    await server.start()
    following = asyncio.create_task(follower.follow())
    async with dial(f"127.0.0.1:{server.port}") as channel:
        yield Lender(
            engine,
            follower,
            control,
            inference_pb2_grpc.InferenceServiceStub(channel),
            weights_pb2_grpc.WeightServiceStub(channel),
        )
    following.cancel()
    await server.stop(0)


async def refused(call: AsyncIterable[inference_pb2.GenerateResponse]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details() or ""


async def test_a_lent_engine_serves_rollouts_at_the_newest_version_and_no_user(
    lender: Lender,
) -> None:
    assert await lender.sampled_by(is_rollout=False) == {1}
    assert "takes no turns of rollouts" in await refused(lender.generate(is_rollout=True))

    await lender.lend()
    await lender.wait_for(LENT, 3)

    assert await lender.sampled_by(is_rollout=True) == {3}
    assert "takes no turns of users" in await refused(lender.generate(is_rollout=False))


async def test_users_are_back_only_once_the_version_of_their_channel_is(lender: Lender) -> None:
    await lender.lend()
    await lender.wait_for(LENT, 3)
    answer = await lender.lend(0)
    assert answer.lending == weights_pb2.LENDING_STATE_RETURNING
    for is_rollout in (True, False):
        with contextlib.suppress(grpc.aio.AioRpcError):  # it may be back by then
            assert await lender.sampled_by(is_rollout=is_rollout) == {1}

    await lender.wait_for(SERVING, 1)

    assert await lender.sampled_by(is_rollout=False) == {1}
    assert lender.engine.dropped_caches >= 1, "what rollouts had cached is of another version"


async def test_turns_of_users_end_before_an_engine_is_lent(lender: Lender) -> None:
    turn = aiter(lender.generate(is_rollout=False, max_tokens=29))
    await anext(turn)
    lender.engine.running.add("held")
    await lender.engine.freeze()
    assert (await lender.lend()).lending == weights_pb2.LENDING_STATE_EMPTYING
    assert lender.engine.live == VersionId(1, 1)
    await lender.engine.thaw()

    versions = {span.sampled.number async for message in turn for span in message.spans}

    assert versions == {1}
    await lender.wait_for(LENT, 3)


async def test_a_rollout_ends_when_the_engine_is_taken_back(lender: Lender) -> None:
    await lender.lend()
    await lender.wait_for(LENT, 3)
    turn = aiter(lender.generate(is_rollout=True, max_tokens=29))
    first = await anext(turn)
    assert first.token_ids
    await lender.engine.freeze()

    await lender.lend(0)

    assert "taken back" in await refused(turn)
    assert not lender.engine.running
    await lender.engine.thaw()
    await lender.wait_for(SERVING, 1)


async def test_an_engine_of_which_no_gateway_hears_any_more_comes_back(lender: Lender) -> None:
    await lender.lend()
    await lender.wait_for(LENT, 3)
    await lender.lend(1)
    await lender.wait_for(SERVING, 1)


def test_users_get_no_version_that_their_channel_never_served(store: MemoryStore) -> None:
    control, writer = LendingControl("demo"), ChannelWriter(store, STABLE, run_uid=RUN)
    channel = FollowedChannel(store=store, name=STABLE, run_uid=RUN, lending=control)
    newest, released = VersionId(1, 3), VersionId(1, 1)

    def state_at(live: VersionId) -> LendingState:
        channel.poll()
        channel.observe(live)
        return control.state

    control.lend(60, now_s=0)
    control.recall(now_s=1)
    assert state_at(newest) is LendingState.RETURNING
    writer.serve(released.number)
    assert state_at(newest) is LendingState.RETURNING
    assert state_at(released) is LendingState.SERVING


async def test_the_load_of_users_is_told(lender: Lender) -> None:
    calls = [aiter(lender.generate(is_rollout=False, max_tokens=29)) for _ in range(2)]
    for call in calls:
        await anext(call)
    assert (await lender.status()).user_turns <= 2
    for call in calls:
        async for _ in call:
            pass
    found = await lender.status()
    assert (found.user_turns, found.user_turns_peak) == (0, 2)
    assert found.observed_seconds > 0


async def test_an_engine_of_a_run_is_not_lent(
    receiver: VersionFollower, engine: MemoryEngine
) -> None:
    server = Server(SERVICES)
    servicer = WeightServicer(receiver)
    weights_pb2_grpc.add_WeightServiceServicer_to_server(servicer, server.grpc_server)
    await server.start()
    async with dial(f"127.0.0.1:{server.port}") as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="follows no channel"):
            await stub.SetLending(weights_pb2.SetLendingRequest(seconds=1), timeout=DEADLINE_S)
    await server.stop(0)


@pytest.mark.parametrize("run", ["other", ""])
def test_no_other_run_samples_on_a_lent_engine(run: str) -> None:
    control = LendingControl("demo")
    other = Identity(domain="d", namespace="lab", run=run, role="trainer")
    for is_rollout in (True, False):
        with pytest.raises(ForbiddenError):
            control.refuse_other_run(other, is_rollout=is_rollout)
        with pytest.raises(ForbiddenError):
            LendingControl().refuse_other_run(other, is_rollout=is_rollout)


def test_a_trainer_does_not_sample_as_a_user() -> None:
    control = LendingControl("demo")
    own = Identity(domain="d", namespace="lab", run="demo", role="trainer")
    control.refuse_other_run(own, is_rollout=True)
    with pytest.raises(ForbiddenError):
        control.refuse_other_run(own, is_rollout=False)
    gateway = Identity(domain="d", namespace="lab", route="r", role="gateway")
    for caller in (gateway, None):
        control.refuse_other_run(caller, is_rollout=False)


@dataclass
class Handed:
    """An engine that changes hands, and the users' turns that it runs."""

    control: LendingControl = field(default_factory=lambda: LendingControl("demo"))
    users: list[contextlib.ExitStack] = field(default_factory=list)

    def start_turn(self) -> None:
        stack = contextlib.ExitStack()
        before = self.control.state
        with contextlib.suppress(UnavailableError):
            stack.enter_context(self.control.admit(is_rollout=False))
            self.users.append(stack)
            assert before is LendingState.SERVING

    def end_turn(self) -> None:
        if self.users:
            self.users.pop().close()

    def do(self, step: str, *, now_s: float) -> None:
        control = self.control
        {
            "lend": lambda: control.lend(2, now_s=now_s),
            "recall": lambda: control.recall(now_s=now_s),
            "expire": lambda: control.expire(now_s=now_s),
            "return": lambda: control.confirm_returned(now_s=now_s),
            "user": self.start_turn,
            "end": self.end_turn,
        }[step]()


STEPS = st.lists(st.sampled_from(["lend", "recall", "expire", "user", "end", "return"]))


@given(STEPS)
def test_whatever_happens_users_and_rollouts_are_never_there_together(steps: list[str]) -> None:
    handed = Handed()
    control = handed.control
    for now_s, step in enumerate(steps):
        before = control.state
        handed.do(step, now_s=now_s)
        assert control.user_turns == len(handed.users)
        assert not (handed.users and control.is_lent)
        if before is LendingState.LENT:
            assert control.state in {LendingState.LENT, LendingState.RETURNING}
        if before is LendingState.RETURNING:
            assert control.state is not LendingState.SERVING or step == "return"
